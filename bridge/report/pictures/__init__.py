"""Pictures of layouts, estimates and schedules, drawn with matplotlib."""
