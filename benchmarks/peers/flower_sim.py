"""Flower's simulation engine (Ray backend): 2 virtual clients at a time, 1 CPU each.
Stock FedAvg strategy and message API; only the client choice is pinned to work.cohort."""

import argparse
import logging
import os
import time

os.environ.update(FLWR_TELEMETRY_ENABLED="0", RAY_USAGE_STATS_ENABLED="0")
import torch
import work
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

client_app = ClientApp()


@client_app.train()
def train(msg: Message, context: Context):
    t = time.perf_counter()
    cfg = msg.content["config"]
    name, rnd, cid = cfg["work"], cfg["server-round"] - 1, cfg["cid"]
    model = work.cached_model(name)  # built once per actor, to Flower's advantage
    model.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    x, y = work.client_batches(name, rnd, cid)
    t1 = time.perf_counter()
    work.local_sgd(model, x, y, work.get_work(name))
    sgd_s = time.perf_counter() - t1
    arrays = ArrayRecord(model.state_dict())
    stats = MetricRecord({"num-examples": 1, "sgd_s": sgd_s, "all_s": time.perf_counter() - t})
    return Message(content=RecordDict({"arrays": arrays, "metrics": stats}), reply_to=msg)


class PinnedFedAvg(FedAvg):
    def __init__(self, name):
        super().__init__(fraction_train=0.1, fraction_evaluate=0.0)
        self.name, self.times, self.agg_s = name, [], []

    def configure_train(self, server_round, arrays, config, grid):
        nodes = sorted(grid.get_node_ids())
        return [
            Message(
                content=RecordDict(
                    {
                        "arrays": arrays,
                        "config": ConfigRecord(
                            {"server-round": server_round, "cid": cid, "work": self.name}
                        ),
                    }
                ),
                message_type="train",
                dst_node_id=nodes[cid],
            )
            for cid in work.cohort(self.name, server_round - 1)
        ]

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        assert all(not r.has_error() for r in replies), [r.error for r in replies if r.has_error()]
        m = [r.content["metrics"] for r in replies]
        self.times.append((sum(x["sgd_s"] for x in m), sum(x["all_s"] for x in m)))
        t = time.perf_counter()
        out = super().aggregate_train(server_round, replies)
        self.agg_s.append(time.perf_counter() - t)
        return out


def main(name):
    w, clock, server_app = work.get_work(name), work.Clock(), ServerApp()
    logging.getLogger("flwr").setLevel(logging.WARNING)

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        torch.set_num_threads(1)
        model = work.make_model(name)
        while len(list(grid.get_node_ids())) < w.clients:
            time.sleep(0.05)

        def eval_fn(rnd, arrays):
            if rnd == 0:
                return clock.start()
            model.load_state_dict(arrays.to_torch_state_dict())
            acc = work.evaluate(model, name)
            clock.round_done(acc)
            return MetricRecord({"acc": acc})

        strategy = PinnedFedAvg(name)
        strategy.start(
            grid, ArrayRecord(model.state_dict()), num_rounds=w.rounds + 1, evaluate_fn=eval_fn
        )
        n = w.rounds
        clock.report(
            client_sgd_s_per_round=sum(t[0] for t in strategy.times[1:]) / n / 2,
            client_all_s_per_round=sum(t[1] for t in strategy.times[1:]) / n / 2,
            aggregate_s_per_round=sum(strategy.agg_s[1:]) / n,
        )

    run_simulation(
        server_app,
        client_app,
        num_supernodes=w.clients,
        backend_config={
            "init_args": {
                "num_cpus": 2,
                "include_dashboard": False,
                "_node_ip_address": "127.0.0.1",
            },
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--work", default="lenet")
    main(ap.parse_args().work)
