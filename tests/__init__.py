"""The test suite: mirrors the package; dist/ runs on real gloo ranks."""
