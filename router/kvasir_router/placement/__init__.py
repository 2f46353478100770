"""Where a request goes: policies, one file each, and the terms of their costs."""
