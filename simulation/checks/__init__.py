"""What must hold in every run, whatever faults occur."""
