"""jitmoe inside frameworks. Each module imports its framework, and is imported only on demand."""
