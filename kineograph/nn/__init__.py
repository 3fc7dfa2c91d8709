"""Network parts without a family: attention, positions, transformer, convolution blocks, quantizers, heads."""
