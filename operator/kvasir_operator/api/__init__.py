"""The manifest: its names, its dataclasses, the rules it must keep, and the door through which it enters."""
