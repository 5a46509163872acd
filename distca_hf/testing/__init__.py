"""For tests, here and in projects that build on distca_hf: ranks in one process, transports that fail on request,
exact attention."""
