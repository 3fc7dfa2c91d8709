"""How noise goes in and comes out, free of any network: masking, guidance, samplers."""
