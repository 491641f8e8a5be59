"""What keeps the files of a Location: a local disk, an object store, any other fsspec filesystem.

base.py     what a Location asks of either, checksums, errors in words
disk.py     a local directory: temporary files, renames, links
remote.py   fsspec: uploads compared with what the store reports
retry.py    which failures of a remote store pass, and how long it is tried
"""
