"""`penstock apply`: the file that declares who may do what, the plan, and its execution."""
