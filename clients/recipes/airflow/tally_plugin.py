"""Makes Airflow call ``tally_airflow``."""

import tally_airflow  # type: ignore[import-not-found]
from airflow.plugins_manager import AirflowPlugin  # type: ignore[import-not-found]


class TallystickPlugin(AirflowPlugin):  # type: ignore[misc]
    """The listener, as Airflow finds it."""

    name = "tallystick"
    listeners = [tally_airflow]  # noqa: RUF012 (as Airflow wants it)
