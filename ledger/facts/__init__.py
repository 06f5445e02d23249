"""The one declaration of everything that is listed: events, statuses, refusals, checks of readiness, metrics."""
