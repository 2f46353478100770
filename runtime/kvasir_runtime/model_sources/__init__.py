"""Models from where they are published to a folder that an engine loads: `kvasir-runtime fetch SOURCE FOLDER`.

`fetch.py` tells the story. A source (`hub.py`, `s3.py`) lists files and reads them from an offset on; everything else
(choice of files, resumption, checks, progress, the lock and the marker of a cache) is the same for each.
"""
