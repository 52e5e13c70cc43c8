"""Loss scales of several libraries on the same overflows, without training: ``python -m mpcompare.scalers ..x..``.

``policies.py`` has a class for each library's policy, and ``libraries.py`` drives the libraries' own code where they
are installed. To add a library is to write both, and an entry in ``registry.py``.
"""
