"""Facts about memory techniques, which the planner and the library both use."""
