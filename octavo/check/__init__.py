"""`octavo check`: what this machine and this configuration can do, before any work."""
