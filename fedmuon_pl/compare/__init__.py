"""Plans, their runs, and what came of them: tables and figures."""
