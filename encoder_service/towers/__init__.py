"""Vision towers: patches in, visual tokens out.

``load_tower`` is the way in; ``Tower`` is what every family implements.
"""

from encoder_service.towers.registry import LoadedTower, load_tower
from encoder_service.towers.tower import Tower, TowerInputs

__all__ = ["LoadedTower", "Tower", "TowerInputs", "load_tower"]
