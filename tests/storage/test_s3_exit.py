"""A process that ends while a background save to an object store is under way: it waits for the end."""

from __future__ import annotations

import unittest

from kit import forked
from kit.compare import check_same
from kit.optimizers import adam
from kit.proxy import Fault, Proxy
from kit.servers import new_bucket, port_of, shared
from kit.trained import Trained

import fsdp_optim
from fsdp_optim.buckets.s3 import S3Bucket

LEAVE = """
import fsdp_optim
from kit.trained import Trained
from kit.optimizers import adam
one = Trained("plain", adam, 1)
asked = {{"storage_options": {options!r}, "progress": False}}
handle = fsdp_optim.async_save({url!r}, one.model, one.optim, options=fsdp_optim.SaveOptions(**asked))
print("done:", handle.done(), flush=True)
"""


class ExitTest(unittest.TestCase):
    def test_the_checkpoint_is_there(self) -> None:
        options = {**shared("rclone"), "part_nbytes": 512}
        slow = Fault("Delay", method="PUT", key=".safetensors", times=-1, seconds=0.3)
        root = f"s3://{new_bucket(options)}/run"
        with Proxy(port_of(options), [slow]) as proxy:
            url = f"{root}/step-1"
            done = forked.run(LEAVE.format(options=proxy.options(options), url=url), preload=forked.TRAINING)
            self.assertEqual((done.returncode, done.stdout), (0, "done: False\n"), done.stderr)
            self.assertEqual(fsdp_optim.latest(root, storage_options=options), url)
            other = Trained("plain", adam, 0)
            fsdp_optim.load(
                url,
                other.model,
                other.optim,
                options=fsdp_optim.LoadOptions(storage_options=options, progress=False, compare=True),
            )
            same = Trained("plain", adam, 1)
            check_same(url, other.model.state_dict(), same.model.state_dict())

    def test_an_error_is_not_lost(self) -> None:
        options = {**shared("rclone"), "part_nbytes": 512, "retry_seconds": 1}
        name = new_bucket(options)
        with Proxy(port_of(options), [Fault("Answer", method="PUT", key=".safetensors", times=-1)]) as proxy:
            url = f"s3://{name}/run/step-1"
            code = LEAVE.format(options=proxy.options(options), url=url)
            done = forked.run(code, preload=forked.TRAINING)
        self.assertIn(url, done.stderr)
        self.assertEqual(list(S3Bucket(name, options).list("")), [])


if __name__ == "__main__":
    unittest.main()
