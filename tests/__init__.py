"""The test suite: mirrors the package; dist/, fuzz/ and nxd_upstream/ run on real gloo ranks."""
