"""`serve-spec bench kernels`: one GPU, figure by figure."""
