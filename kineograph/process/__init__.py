"""How noise goes in and comes out, free of any network: masking, autoregression, diffusion, guidance, solvers."""
