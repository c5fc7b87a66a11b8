"""What users get for their own tests: an embedded broker and a pytest plugin."""
