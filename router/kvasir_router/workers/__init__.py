"""Several processes behind one port (`--workers`): who starts and replaces them, and what they tell as one."""
