"""Virtual computers that shipped nodes run on: event loop, network, disks, clocks and threads, from one seed."""
