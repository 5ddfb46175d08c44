"""A comparison's figures and table in TensorBoard, as a run of its own beside those it compares."""

import struct
import time
from collections.abc import Mapping
from pathlib import Path

__all__ = ["write_pages"]


def write_pages(folder: Path, pictures: Mapping[str, Path], texts: Mapping[str, str]) -> Path:
    """Writes one event file, in place of an earlier one.

    Args:
        folder: The run's folder, such as ``runs/mnist5k/compare``.
        pictures: PNG files by tag.
        texts: Markdown by tag.

    Returns:
        The event file.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.summary.writer.record_writer import RecordWriter

    values = []
    for tag, path in pictures.items():
        data = path.read_bytes()
        width, height = struct.unpack(">II", data[16:24])  # PNG's first chunk
        image = Summary.Image(width=width, height=height, colorspace=3, encoded_image_string=data)
        values.append(Summary.Value(tag=tag, image=image))
    for tag, text in texts.items():
        tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode()])
        plugin = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        values.append(Summary.Value(tag=tag, metadata=plugin, tensor=tensor))
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("events.out.tfevents.*.compare"):
        old.unlink()
    now = time.time()
    path = folder / f"events.out.tfevents.{int(now)}.compare"
    with path.open("wb") as file:
        writer = RecordWriter(file)
        writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
        for value in values:
            event = Event(wall_time=now, step=0, summary=Summary(value=[value]))
            writer.write(event.SerializeToString())
        writer.flush()
    return path
