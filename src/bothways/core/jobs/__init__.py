"""One function over many jobs, in processes of this machine."""
