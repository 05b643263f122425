"""What the vocabulary is built from: fields of settings, and long lists said as changes."""
