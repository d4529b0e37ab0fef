"""Vision towers: patches in, visual tokens out.

``load_tower`` is the entry point; ``Tower`` is the interface of every family.
"""

from encoder_service.towers.registry import LoadedTower, load_tower
from encoder_service.towers.tower import Tower, TowerInputs

__all__ = ["LoadedTower", "Tower", "TowerInputs", "load_tower"]
