"""Where a request goes: policies, and the terms of their costs."""
