"""One script a peer, run by the Python of the peer's own environment. They import no minillm, it imports no peer."""
