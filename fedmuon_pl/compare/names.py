"""How methods are called in tables and figures: the one place to give a new one a name."""

__all__ = ["NAMES", "display_name", "higher_is_better"]

NAMES = {
    "fedmuon": "FedMuon",
    "fedmuon_official": "FedMuon (official)",
    "fedmuon_lowrank": "FedMuon (low rank)",
    "fedmuon_cached": "FedMuon (cached)",
    "fedmuon_lmo": "FedMuon-LMO",
    "local_muon": "Local Muon",
    "local_muon_cut": "Local Muon (cut SVD)",
    "fedavg": "FedAvg",
    "fedavgm": "FedAvgM",
    "fedavg_momentum": "FedAvg (momentum)",
    "scaffold_momentum": "SCAFFOLD (momentum)",
    "fedavg_adam": "FedAvg (Adam)",
    "fedprox": "FedProx",
    "fedbn": "FedBN",
    "fednova": "FedNova",
    "feddyn": "FedDyn",
    "fedcm": "FedCM",
    "scaffold": "SCAFFOLD",
    "mime": "Mime",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "fedadagrad": "FedAdagrad",
    "fedadamw": "FedAdamW",
    "fedacg": "FedACG",
    "local_adamw": "Local AdamW",
    "fedmuon_fedadam": "FedMuon + FedAdam",
    "scaffold_i": "SCAFFOLD (option I)",
    "mimelite": "MimeLite",
    "fedlada": "FedLADA",
    "muloco": "MuLoCo",
    "server_muon": "Server Muon",
    "fedpac_adamw": "FedPAC (AdamW)",
    "fedpac_soap": "FedPAC (SOAP)",
    "aligned_sgd": "Aligned SGD",
    "aligned_adamw": "Aligned AdamW",
    "local_soap": "Local SOAP",
    "local_muon_fedavgm": "Local Muon + FedAvgM",
}


def display_name(method: str) -> str:
    """A method's name as papers write it; an unknown one stays as it is."""
    label, _, point = method.partition("@")
    name = NAMES.get(label, label)
    return f"{name} ({point.replace(',', ', ')})" if point else name


def higher_is_better(metric: str) -> bool:
    """False for losses, errors and perplexities."""
    return not any(word in metric.lower() for word in ("loss", "err", "ppl", "perplexity"))
