r"""Sites: each client's factor of the posterior, measured along its training, so that no data are counted twice."""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_fedbayes.core.errors import FederationError, FusionError, check_number, shown
from lightning_fedbayes.core.posterior import GaussianPosterior, flatten, is_zero, zeros_like
from lightning_fedbayes.methods import method
from lightning_fedbayes.methods.late import Late, moved

MEMORY = 0.5
"""Part of a site that stays after a round: training is noisy, and all clients move at once. Clients that train in a
tenth of the rounds have measured theirs ten rounds ago, at another model: little of it stays."""
WIDTH = 0.1
"""Widest start, as a part of a tensor's weights, as layers and IVON have it."""
Prior = float | Mapping[str, float]
"""One number for all Gaussian parameters, or one for each tensor by its name in the posterior."""


class _Round(NamedTuple):
    """Values that all clients of a round have in common, flat and in float64. P parameters, G of them Gaussian.

    Args:
        names: of the Gaussian tensors.
        lengths: name → entries, of all tensors in the order of the posterior.
        rows: where the Gaussian entries are among all, shape (P,), bool; a slice if they are all or none.
        mean: global, shape (P,).
        precision: global, shape (G,).
        known: the same without what is left of the width at the start.
        prior: precision of the prior, shape (G,).
        slope: gradient of the prior's energy at the global mean, shape (G,).
        gradient: of all clients' data, extrapolated to those that were never heard, shape (P,).
    """

    names: tuple[str, ...]
    lengths: Mapping[str, int]
    rows: Tensor | slice
    mean: Tensor
    precision: Tensor
    known: Tensor
    prior: Tensor
    slope: Tensor
    gradient: Tensor


class Sites(method.Method):
    r"""The posterior of the pooled data: prior times one measured factor, or *site*, of every client.

    The site of client k is :math:`\exp(-g_k (\theta - m) - \tfrac12 \Lambda_k (\theta - m)^2)` about the global mean m,
    with the mean gradient :math:`g_k` of its data and their curvature :math:`\Lambda_k \ge 0`, entry by entry. The
    global posterior is :math:`N(m, 1/\Lambda)`, :math:`\Lambda = \Lambda_0 + \sum_k \Lambda_k` with the prior
    :math:`N(m_0, 1/\Lambda_0)`, and :math:`c = \Lambda_0 (m - m_0) + \sum_k g_k` is the gradient of the negative pooled
    ELBO. A round, for every client k of the cohort with :math:`w_k = n_k / N`:

    1. It trains from m, with the width fixed at :math:`\Lambda^{-1/2}` and its own optimizer, whose state it keeps. Its
       loss gains :math:`\tau / n_k` times

       .. math:: (\gamma w_k c - g_k)\,\theta + \tfrac12 w_k \Lambda (\theta - m)^2,

       the control variates of SCAFFOLD and its share of the divergence from the global posterior. A client that was
       never heard takes :math:`\tfrac12 w_k \Lambda_0 (\theta - m_0)^2` in their place.
    2. It measures along its training, with the gradients :math:`\ell'` of its data's loss at its draws:

       .. math:: G = \tfrac{n_k}{\tau}\,\overline{\ell'}, \qquad
                 F = \tfrac{n_k}{\tau}\,\overline{\ell_i'^2}, \qquad
                 H = \tfrac{n_k}{\tau}\,\overline{\partial \ell / \partial \sigma} / \sigma .

       H is unbiased (Price's theorem) and noisy, the squares F of single examples' gradients are neither. So the
       curvature is F times one factor per tensor, :math:`\sum H / \Lambda` over :math:`\sum F / \Lambda`, which gives
       way to 1 as far as it is noise (:func:`~lightning_fedbayes.clients.problems.factor_of`).
    3. It moves its site there, but for :math:`2^{-a}` of the way, and sends :math:`\theta_k` and the changes of its
       site. A is the mean number of rounds from one message of a client to its next, 1 where all train in each round.
    4. The server moves m by the weighted mean of :math:`\theta_k - m`, and adds the changes up. Clients that have not
       been heard since m moved have other gradients by now, of which their curvature tells: c gains

       .. math:: \Big(\sum_k \Lambda_k\Big)\, d, \qquad d \leftarrow (1 - p)(d + \Delta m),

       with the moves d of m since a site was measured, in the mean, and the share p of clients that are heard in the
       round. Where all are, it is 0. Otherwise many clients would follow one old gradient, each to its end. What is
       left of that shows in the gradient :math:`\hat c` that a round finds in place of the c that it was told:

       .. math:: \gamma = \left(\overline{\langle \hat c, c / \Lambda \rangle} \,/\,
                 \overline{\langle c, c / \Lambda \rangle}\right)^{1 - 1/a} \in [0, 1],

       from means over the last a rounds (of deterministic parameters without :math:`\Lambda`).

    Where this stands still, c = 0: the means are those of the pooled data's mean-field posterior, and the traces of the
    variances. :math:`g_k` is a mean of gradients that were seen, so that nothing winds up however short training is.

    Deterministic parameters are the case :math:`\Lambda_0 = \Lambda_k = 0`: SCAFFOLD with measured control variates and
    any optimizer. No divergence holds them: where its loss is flat, a client follows a control variate to the end of
    its training, and those of a few clients do not add up to 0. So next to Gaussian ones they count :math:`2^{1 - a}`.
    Of layers whose single examples cannot be told apart, such as recurrent ones, F is the square of batches' mean
    gradients. Of :class:`~lightning_fedbayes.IVON` the curvature is its own estimate, of
    :class:`~lightning_fedbayes.Laplace` the information at the model that the client has received.

    Until all clients have been heard, those that have not count as the mean of those that have. So that draws do not
    take an untrained network apart, the precision at the start, at least that of a tenth of the tensor's weights, is
    added to that of draws, and fades as sites do: a round leaves :math:`1 - p (1 - 2^{-a})` of it. It says nothing of
    the data, and no loss of a client has it. Figures, in nats per Gaussian parameter: ``sites/change``, the divergence
    of the new posterior from the old one; ``sites/decrement``, the Newton decrement :math:`c^2 / 2\Lambda`, 0 at the
    fixed point. Where no two columns share a direction it is the divergence that is left, elsewhere much less:
    independent widths do not know such directions. It stays at the noise of local training.

    When to use it: the posterior is to mean something after many rounds, above all with unlike clients. It needs layers
    of this package with normal priors and a loss with their KL divergence over the number of the client's examples, or
    IVON, or Laplace; or no posterior at all. Clients send three numbers for each Gaussian parameter and two for each
    deterministic one.

    Args:
        prior_mean, prior_std: :math:`m_0` and :math:`\Lambda_0^{-1/2}` of the network's own priors: a number for all,
            or one for each tensor by name.

    Raises:
        FusionError: an argument is out of range.

    Source: Ashman et al. 2022 (sites); Karimireddy et al. 2020 (control variates); Opper and Archambeau 2009, Lin et
    al. 2019 (Price's theorem); Khan et al. 2018 (squares as the shape of the curvature).
    """

    registered: ClassVar[str] = "sites"
    keeps: ClassVar[str] = "its site, which the posterior still counts, and would count its data twice"
    keeps_optimizer: ClassVar[bool] = True
    sends: ClassVar[bool] = True
    sent: ClassVar[tuple[str, ...]] = ("gradient", "precision", "examples", "clients")
    told: ClassVar[tuple[str, ...]] = ("slope", "examples", "clients", "age", "start")
    adds: ClassVar[bool] = True
    sends_means: ClassVar[bool] = True

    def __init__(self, prior_mean: Prior = 0.0, prior_std: Prior = 1.0) -> None:
        super().__init__("weighted_average")
        for value in prior_mean.values() if isinstance(prior_mean, Mapping) else [prior_mean]:
            check_number("prior_mean", value, "(-1e38, 1e38)", error=FusionError)
        for value in prior_std.values() if isinstance(prior_std, Mapping) else [prior_std]:
            check_number("prior_std", value, "(1e-19, 1e19)", error=FusionError, why="it is a standard deviation")
        self.prior_mean, self.prior_std = prior_mean, prior_std

    def prior_of(self, name: str) -> tuple[float, float]:
        """Return mean and standard deviation of the prior of a Gaussian tensor.

        Raises:
            FederationError: priors are given by name, and this one's is not.
        """
        found = []
        for each in (self.prior_mean, self.prior_std):
            if isinstance(each, Mapping) and name not in each:
                raise FederationError(f"fusion=Sites(...) has no prior of '{name}': give it, or one number for all")
            found.append(float(each[name] if isinstance(each, Mapping) else each))
        return found[0], found[1]

    def agreement(self) -> str:
        return f"sites, prior_mean={self.prior_mean}, prior_std={self.prior_std}"

    def conflict(self, weighting: Any, private: bool) -> tuple[str, str] | None:
        if private:
            return "privacy=", (
                "a client would keep another site than the one that noise leaves at the server. Take another rule, or "
                "train with ExamplePrivacy"
            )
        if weighting not in ("train_size", "equal"):
            return f"weighting={shown(weighting)}", (
                "sites count as they are, and weights are those of the clients' moves alone; give 'train_size' or "
                "'equal'"
            )
        return None

    # -- at the client -------------------------------------------------------------------------------------------------

    def problem(self, shared: method.Shared, client: method.Participant) -> method.LocalProblem:
        """Return the client's control variates and its share of the divergence from the global posterior."""
        common, kept = self._common(shared), client.kept
        share = self._weight(shared, client)
        dtypes = {shared.posterior.mean[name].dtype for name in common.lengths}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.float64
        if kept:
            _, age, gain = shared.tensors["age"].float().tolist()  # as they travel
            slope = torch.sub(kept["gradient"].to(common.mean.device), common.gradient, alpha=share)
            own = common.gradient[common.rows] * (share * (1 - gain))
            slope[common.rows] += own.sub_(common.slope, alpha=share * gain)
            if isinstance(common.rows, Tensor):
                slope[~common.rows] *= MEMORY ** max(0.0, age - 1)
            strength = share * common.known
        else:
            slope = torch.zeros_like(common.mean)
            slope[common.rows] = -share * common.slope
            strength = share * common.prior
        slopes = self._split(common.lengths, slope.to(dtype), shared)
        own = {name: common.lengths[name] for name in common.names}
        prior = method.Quadratic(
            self._split(own, strength.to(dtype), shared), {name: slopes[name] for name in own}, frozenset(own)
        )
        rest = {name: value / client.num_examples for name, value in slopes.items() if name not in own}
        quadratic = method.Quadratic(slope=rest, names=frozenset(rest)) if kept and rest else None
        return method.LocalProblem(quadratic, prior if own else None, measures=True)

    def report(self, shared: method.Shared, client: method.Participant, trained: method.Trained) -> method.Report:
        """Return what the client has trained and measured, and its new site, bit by bit what the server adds up.

        Raises:
            FusionError: training has left the finite numbers.
        """
        common, kept = self._common(shared), client.kept
        like = common.mean
        before = {
            name: kept[name].to(like.device) if kept else torch.zeros_like(whole)
            for name, whole in (("gradient", common.mean), ("precision", common.precision))
        }
        parts = dict(zip(common.lengths, before["gradient"].split([*common.lengths.values()])))
        gradient = torch.cat(
            [
                trained.gradients[name].reshape(-1).to(like) if name in trained.gradients else part
                for name, part in parts.items()
            ]
        )
        share = self._weight(shared, client)
        old = dict(zip(common.names, before["precision"].split([common.lengths[name] for name in common.names])))
        found, strength = [], share * (common.known if kept else common.prior)
        strengths = dict(zip(common.names, strength.split([len(each) for each in old.values()])))
        for name, part in old.items():
            if name in trained.precisions:
                found.append(trained.precisions[name].reshape(-1).to(like))
            elif name in trained.gradients:  # its optimizer, or its source, has the posterior under the local prior
                local = trained.posterior.variance[name].reshape(-1).to(like).reciprocal()
                found.append(local.sub_(strengths[name]).clamp_min_(0))
            else:
                found.append(part)
        precision = torch.cat(found) if found else like[:0]
        rounds, age, _ = shared.tensors["age"].float().clamp_min(0).tolist()  # as they travel
        stays = MEMORY ** (age if kept else rounds + 1)
        if kept:
            gradient.lerp_(before["gradient"], stays)
        precision.lerp_(before["precision"], stays)
        counts = {"examples": like.new_tensor(float(client.num_examples)), "clients": like.new_ones(())}
        changes, own = {}, {}
        for name, new in {"gradient": gradient, "precision": precision, **counts}.items():
            start = kept[name].to(like.device) if kept else torch.zeros_like(new)
            changes[name] = new.sub_(start).float()
            own[name] = start + changes[name]
        mean = trained.posterior.mean
        extremes = (torch.stack(each.aminmax()) for each in own.values() if each.numel())
        if not all(bool(each.isfinite().all()) for each in (*mean.values(), *extremes)):
            raise FusionError(
                f"client {client.number}: training has left the finite numbers; lower the learning rate, or clip "
                "gradients (Trainer(gradient_clip_val=...))"
            )
        return method.Report(GaussianPosterior.point_mass(mean), own, changes)

    def check(self, shared: method.Shared, client: method.Participant) -> None:
        common = self._common(shared)
        lengths = {"gradient": len(common.mean), "precision": len(common.precision), "examples": 1, "clients": 1}
        for name, length in lengths.items():
            own = client.kept[name].numel() if name in client.kept else 0
            if own != length:
                raise FederationError(
                    f"the site of client {client.number} is of {own} parameters ({name}), and the network has "
                    f"{length}: go on with the network that it was trained with, or begin anew"
                )

    # -- at the server -------------------------------------------------------------------------------------------------

    def init(self, posterior: GaussianPosterior) -> method.Tensors:
        """Return sums over all clients, 0: of gradients (P,), precisions (G,), examples and clients.

        "age" are the number of rounds, of those from one message of a client to its next, in the mean, and γ. "slope"
        is the sum of gradients as they should be by now, after "_moves" of the means, and "_found" what γ is a ratio
        of. "start" is what is left of the width at the start, a precision for each Gaussian tensor.
        """
        device = next(iter(posterior.mean.values())).device
        count = sum(value.numel() for value in posterior.mean.values())
        gaussian = sum(posterior.mean[name].numel() for name in gaussian_names(posterior))
        sizes = {
            "gradient": (count,),
            "precision": (gaussian,),
            "examples": (),
            "clients": (),
            "age": (3,),
            "slope": (count,),
            "_moves": (gaussian,),
            "_found": (2,),
        }
        tensors = {name: torch.zeros(size, dtype=torch.float64, device=device) for name, size in sizes.items()}
        start = [torch.zeros(0, dtype=torch.float64, device=device)]
        for name in gaussian_names(posterior):
            mean, precision = posterior.mean[name].double(), posterior.variance[name].double().reciprocal()
            widest = float(WIDTH**-2 / mean.square().mean())
            start.append((precision.clamp_max(widest).mean() - self.prior_of(name)[1] ** -2).clamp_min(0).view(1))
        return {**tensors, "start": torch.cat(start)}

    def fuse(
        self, shared: method.Shared, fused: GaussianPosterior, averages: Mapping[str, Tensor], heard: float
    ) -> tuple[GaussianPosterior, Mapping[str, Tensor]]:
        """See :meth:`Method.fuse`. ``averages`` are the sums of the clients' changes."""
        tensors = {n: value + averages[n] if n in averages else value for n, value in shared.tensors.items()}
        names = gaussian_names(shared.posterior)
        lengths = {name: fused.mean[name].numel() for name in names}
        scale = self._scale(shared, tensors)
        strength = tensors["precision"].clamp_min(0)
        precision = torch.add(self._common(shared).prior, strength, alpha=scale)
        rounds, age, _ = tensors["age"].tolist()
        messages, rounds = heard + (rounds / age if rounds else 0.0), rounds + 1  # of a client
        age = rounds / max(messages, shared.share)
        tensors["start"] = tensors["start"] * (1 - heard * (1 - MEMORY**age))  # as of sites
        for part, start in zip(precision.split([*lengths.values()]), tensors["start"].tolist()):
            part += start
        own = self._split(lengths, precision.reciprocal(), shared)
        posterior = GaussianPosterior(
            fused.mean, {n: own[n].to(mean.dtype) if n in own else zeros_like(mean) for n, mean in fused.mean.items()}
        )
        tensors |= self._behind(shared, posterior, averages, strength, heard)
        found, told = tensors["_found"].tolist()
        gain = min(max(found / told, 0.0), 1.0) if told > 0 else 1.0
        numbers = precision.new_tensor([rounds, age, gain ** max(0.0, 1 - 1 / age)])
        return posterior, {**tensors, "age": numbers}

    def _behind(
        self,
        shared: method.Shared,
        posterior: GaussianPosterior,
        changes: Mapping[str, Tensor],
        strength: Tensor,
        heard: float,
    ) -> method.Tensors:
        """Return the slope (P,) after a round: the sum of gradients, and what those of the others have changed by."""
        common, tensors, told = self._common(shared), shared.tensors, self.slope(shared)
        rest = max(0.0, round(1 - heard, 12))
        change = changes.get("gradient", told.new_zeros(()))
        known = 1 - float(changes.get("clients", 0.0)) * shared.share / heard  # of the round's clients had a site
        found = (tensors["gradient"] * (known * self._scale(shared, tensors))).add_(change, alpha=1 / heard)
        found[common.rows] += common.slope
        wide = told.clone()
        wide[common.rows] /= common.precision
        products = torch.stack([found @ wide, told @ wide])
        means = flatten(posterior.mean.values(), torch.float64).sub_(common.mean)
        moves = means[common.rows].add(tensors["_moves"]).mul_(rest)
        slope = tensors["gradient"] + change
        slope[common.rows] += strength * moves
        return {"slope": slope, "_moves": moves, "_found": rest * tensors["_found"] + products}

    def figures(
        self, shared: method.Shared, posterior: GaussianPosterior, tensors: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """Return change and decrement. Nothing of a network without Gaussian parameters."""
        before = self._common(shared)
        if not before.names:
            return {}
        mean, variance = (each[before.rows] for each in posterior.flatten())
        move, ratio = mean - before.mean[before.rows], before.precision * variance
        change = ratio.log().neg_().add_(ratio).sub_(1).addcmul_(before.precision, move.square()).mean() / 2
        slope = torch.addcmul(before.slope, before.prior, move)
        slope.add_(tensors["slope"].to(move)[before.rows], alpha=self._scale(shared, tensors))
        return {"sites/change": float(change), "sites/decrement": float(slope.square_().mul_(variance).mean() / 2)}

    def check_late(self, posterior: GaussianPosterior) -> None:
        """See :meth:`Method.check_late`: a site is about a client's data, whatever model it started from."""

    def late(
        self, sent: GaussianPosterior, started: method.Shared, now: method.Shared, staleness: int, how: Late
    ) -> GaussianPosterior:
        """Return the present means, moved as far as the client has moved those that it started from."""
        return moved(sent, started.posterior, now.posterior) if staleness else sent

    def counted(self, posterior: GaussianPosterior) -> GaussianPosterior | None:
        """See :meth:`Method.counted`: the prior, counted once."""
        names = gaussian_names(posterior)
        if not names:
            return None
        mean, variance = dict(posterior.mean), {n: zeros_like(value) for n, value in posterior.mean.items()}
        for name in names:
            centre, std = self.prior_of(name)
            mean[name] = torch.full_like(mean[name], centre)
            variance[name] = torch.full_like(mean[name], std**2)
        return GaussianPosterior(mean, variance)

    @staticmethod
    def without(posterior: GaussianPosterior, kept: Mapping[str, Tensor]) -> GaussianPosterior | None:
        r"""Return the posterior without a client's site: :math:`\Lambda' = \Lambda - \Lambda_k`, :math:`m + g_k /
        \Lambda'`.

        Exact where the model is conjugate. Elsewhere the others' sites have been measured beside the one that goes.

        Raises:
            FusionError: the other sites give a parameter no positive precision.
        """
        names = gaussian_names(posterior)
        lengths = [value.numel() for value in posterior.mean.values()]
        if not {"gradient", "precision"} <= kept.keys() or not names:
            return None
        owned = [posterior.mean[name].numel() for name in names]
        if (len(kept["gradient"]), len(kept["precision"])) != (sum(lengths), sum(owned)):
            raise FusionError(f"a site of {len(kept['gradient'])} parameters, but the posterior has {sum(lengths)}")
        gradients = dict(zip(posterior.names, kept["gradient"].split(lengths)))
        mean, variance = dict(posterior.mean), dict(posterior.variance)
        for name, own in zip(names, kept["precision"].split(owned)):
            old = variance[name].double()
            left = 1 / old - own.view(old.shape).to(old)
            wrong = int((left <= 0).sum())
            if wrong:
                raise FusionError(
                    f"without that client {wrong} of {left.numel()} entries of '{name}' have no positive precision; "
                    "train some rounds of the others from the posterior as it is"
                )
            mean[name] = (mean[name] + gradients[name].view(old.shape).to(old) / left).to(mean[name].dtype)
            variance[name] = (1 / left).to(mean[name].dtype)
        return GaussianPosterior(mean, variance)

    # -- what both ends work out ---------------------------------------------------------------------------------------

    def _common(self, shared: method.Shared) -> _Round:
        """Return what all clients of a round have in common, computed for the first of them."""
        if "sites" not in shared.notes:
            posterior = shared.posterior
            names = gaussian_names(posterior)
            lengths = {name: value.numel() for name, value in posterior.mean.items()}
            mean, variance = posterior.flatten()
            rows: Tensor | slice = slice(len(mean) if names else 0)
            if 0 < len(names) < len(lengths):
                rows = torch.cat([torch.full((n,), name in names, device=mean.device) for name, n in lengths.items()])
            begun = shared.tensors["start"].float().tolist()  # as it travels
            priors = [(lengths[name], *self.prior_of(name), start) for name, start in zip(names, begun)]
            parts = ([mean.new_full((n,), each[i] ** p) for n, *each in priors] for i, p in enumerate((1, -2, 1)))
            centre, prior, start = (torch.cat([mean[:0], *each]) for each in parts)
            precision = variance[rows].reciprocal() if names else mean[:0]
            natural = precision, (precision - start).maximum(prior), prior, (mean[rows] - centre).mul_(prior)
            told = shared.tensors["slope"].to(mean.device).float().double()  # as it travels
            slope = told.mul_(self._scale(shared, shared.tensors))
            shared.notes["sites"] = _Round(names, lengths, rows, mean, *natural, slope)
        return shared.notes["sites"]

    def slope(self, shared: method.Shared) -> Tensor:
        """See :meth:`Method.slope`: c, of the negative pooled ELBO. 0 before any client has been heard."""
        common = self._common(shared)
        if "slope" not in shared.notes:
            slope = common.gradient.clone()
            slope[common.rows] += common.slope
            shared.notes["slope"] = slope if shared.tensors["clients"] else slope.zero_()
        return shared.notes["slope"]

    @staticmethod
    def _scale(shared: method.Shared, tensors: Mapping[str, Tensor]) -> float:
        """Return the number of clients over those that have been heard."""
        heard = float(tensors["clients"])
        return max(1.0, 1 / (shared.share * heard)) if heard else 1.0

    @staticmethod
    def _weight(shared: method.Shared, client: method.Participant) -> float:
        """Return a client's part of all examples, as far as they are known."""
        known, heard = (float(shared.tensors[name]) for name in ("examples", "clients"))
        return shared.share * client.num_examples * heard / known if known > 0 else shared.share

    @staticmethod
    def _split(lengths: Mapping[str, int], flat: Tensor, shared: method.Shared) -> dict[str, Tensor]:
        """Return a flat vector by name, in the parameters' shapes."""
        return {
            name: part.view(shared.posterior.mean[name].shape)
            for name, part in zip(lengths, flat.split([*lengths.values()]))
        }


def gaussian_names(posterior: GaussianPosterior) -> tuple[str, ...]:
    """Return the names of the tensors that have a variance."""
    return tuple(name for name, value in posterior.variance.items() if not is_zero(value) and bool((value > 0).any()))
