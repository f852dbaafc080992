"""The federation in FLARE's simulator."""

from digits import Digits
from nvflare.recipe import SimEnv

from lightning_fedbayes.nvflare import FusionRecipe

if __name__ == "__main__":
    recipe = FusionRecipe("digits", Digits(), "client.py", min_clients=2)
    recipe.execute(SimEnv(num_clients=2))
