"""One file a framework, behind one interface."""
