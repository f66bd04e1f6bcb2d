"""Software engineering: bugs of real projects, mended in a sandbox, scored by hidden tests."""
