"""What a sandbox does with an upload: inspect it, build its artifacts, profile them."""
