"""What a run keeps on disk: published policies, batch files and trainer state, each valid only when complete."""
