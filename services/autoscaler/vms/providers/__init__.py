"""Where machines come from, one file each, behind one interface."""
