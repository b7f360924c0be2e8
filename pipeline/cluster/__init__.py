"""The Ray cluster: started or joined, its nodes, the pool of workers, live progress."""
