"""From scores to advantages of tokens: penalties, baselines, whitening."""
