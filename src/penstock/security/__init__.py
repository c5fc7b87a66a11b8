"""Who may connect, and what each may do. Rules only: no sockets, clocks or randomness except as arguments."""
