"""Real human antibody heavy chains: fetched from a Debian package, translated, numbered after IMGT.

The package r-cran-alakazam carries 1,999 rearrangements, aligned so that the place of a nucleotide in the alignment
is its IMGT number: codon 23 is the first conserved cysteine, codon 104 the second, and the loops (CDR) have fixed
borders. The chains are made on the user's machine; none ship with this library.
"""

from __future__ import annotations

import csv
import gzip
import io
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mdmi_fast.files import cache_folder, read_text, replace_file

PACKAGE = "r-cran-alakazam"
_MEMBER = Path("usr/lib/R/site-library/alakazam/extdata/example_airr.tsv.gz")
_RESIDUES = frozenset("ACDEFGHIKLMNPQRSTVWY")
_CDR1, _CDR2 = (27, 38), (56, 65)
_CYSTEINE_1, _CYSTEINE_2 = 23, 104
"""IMGT numbers; the third loop begins behind the second cysteine and ends two residues of the junction's length on."""


class Chain(NamedTuple):
    """A heavy chain.

    Attributes:
        name: of the rearrangement.
        residues: one letter each.
        cdrs: (start, end) of the three loops, from 0, end excluded.
        cysteines: places of the conserved pair.
    """

    name: str
    residues: str
    cdrs: tuple[tuple[int, int], ...]
    cysteines: tuple[int, int]

    def regions(self) -> np.ndarray:
        """[len(residues)] int: 0 to 6 for FR1, CDR1, FR2, CDR2, FR3, CDR3, FR4."""
        borders = [border for cdr in self.cdrs for border in cdr]
        return np.searchsorted(borders, np.arange(len(self.residues)), side="right")


def own_chains() -> list[Chain]:
    """The chains of `fetch_chains`, fetched once and kept in the cache folder.

    Raises:
        ImportError: without platformdirs.
        OSError: as `fetch_chains`.
    """
    path = cache_folder() / "heavy_chains.fasta"
    if not path.exists():
        write_fasta(fetch_chains(), path)
    return read_fasta(path)


def fetch_chains(*, package: Path | None = None) -> list[Chain]:
    """The distinct, complete heavy chains of the Debian package, in its order.

    Args:
        package: the .deb file, downloaded elsewhere; None downloads it with apt-get.

    Raises:
        OSError: if it cannot be downloaded or unpacked.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if package is None:
            _call("apt-get", "download", PACKAGE, folder=folder)
            package = next(folder.glob(f"{PACKAGE}_*.deb"))
        _call("dpkg-deb", "--extract", str(package.absolute()), "content", folder=folder)
        with gzip.open(folder / "content" / _MEMBER, "rt") as file:
            found = [translate(row) for row in csv.DictReader(file, delimiter="\t")]
    distinct = {chain.residues: chain for chain in reversed(found) if chain is not None}
    return list(reversed(distinct.values()))


def translate(row: dict[str, str]) -> Chain | None:
    """The chain of an AIRR rearrangement, or None where it is no heavy chain, incomplete, or has doubtful residues.

    Args:
        row: of an AIRR table; `sequence_alignment` is numbered after IMGT with "." for gaps.
    """
    from Bio.Seq import Seq

    if row["locus"] != "IGH" or row["productive"] != "T":
        return None
    aligned = row["sequence_alignment"].upper()
    numbers, codons = [], []
    for start in range(0, len(aligned) - 2, 3):
        codon = aligned[start : start + 3]
        if codon != "...":
            numbers.append(start // 3 + 1)
            codons.append(codon)
    if any(set(codon) - set("ACGT") for codon in codons):
        return None
    residues = str(Seq("".join(codons)).translate())
    if set(residues) - _RESIDUES or not {_CYSTEINE_1, _CYSTEINE_2} <= set(numbers) or numbers[0] != 1:
        return None
    first, second = numbers.index(_CYSTEINE_1), numbers.index(_CYSTEINE_2)
    end = second + int(row["junction_length"]) // 3 - 1
    if residues[first] != "C" or residues[second] != "C" or residues[end : end + 1] != "W":
        return None  # shifted against the numbering
    borders = [int(np.searchsorted(numbers, number)) for low, high in (_CDR1, _CDR2) for number in (low, high + 1)]
    loops = ((borders[0], borders[1]), (borders[2], borders[3]), (second + 1, end))
    return Chain(row["sequence_id"], residues, loops, (first, second))


def write_fasta(chains: Sequence[Chain], path: Path) -> None:
    """Write chains as FASTA; loops and cysteines go into the description, from 0, end excluded."""
    from Bio import SeqIO
    from Bio.Seq import Seq
    from Bio.SeqRecord import SeqRecord

    records = []
    for chain in chains:
        loops = " ".join(f"cdr{number}={a}-{b}" for number, (a, b) in enumerate(chain.cdrs, 1))
        description = f"{loops} cysteines={chain.cysteines[0]}-{chain.cysteines[1]}"
        records.append(SeqRecord(Seq(chain.residues), id=chain.name, description=description))
    with replace_file(path) as temporary, temporary.open("w") as file:
        SeqIO.write(records, file, "fasta")


def read_fasta(path: Path) -> list[Chain]:
    """Read chains that `write_fasta` wrote.

    Raises:
        ValueError: if the file holds no such chains.
    """
    from Bio import SeqIO

    records = list(SeqIO.parse(io.StringIO(read_text(path)), "fasta"))
    chains = []
    for record in records:
        told = dict(part.split("=", 1) for part in record.description.split()[1:] if "=" in part)
        try:
            places = [tuple(map(int, told[name].split("-"))) for name in ("cdr1", "cdr2", "cdr3", "cysteines")]
            *loops, cysteines = [(a, b) for a, b in places]
        except (KeyError, ValueError):
            raise ValueError(f"{path}: {record.id} does not say where its loops and cysteines are") from None
        chains.append(Chain(record.id, str(record.seq), tuple(loops), cysteines))
    if not chains:
        raise ValueError(f"{path}: holds no chains in FASTA format")
    return chains


def _call(*command: str, folder: Path) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise OSError(f"{command[0]} is missing: fetch {PACKAGE} on Debian or Ubuntu, or unpack it elsewhere") from None
    except subprocess.CalledProcessError as error:
        said = (error.stderr or "nothing").strip().splitlines()[-1:]
        raise OSError(f"{' '.join(command)} failed: {' '.join(said)}") from error
