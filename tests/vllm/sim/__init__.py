"""A vLLM engine without a model: the real scheduler and block pool, our connector on real CPU tensors, and a forward
pass that writes bytes known by arithmetic, so that whatever is loaded or stored can be checked to the byte."""
