"""What several leaves share. Nothing here imports another part of torchfast."""
