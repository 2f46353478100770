"""The desired objects as processes of this machine, one loopback address a pod."""
