"""What trials run on: the interface of a pool of workers, a worker, and Ray's side of it."""
