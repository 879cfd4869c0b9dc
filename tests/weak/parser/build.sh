#!/bin/sh
# Compiles onnx-tensorrt's parser of TensorRT 8 with recorder.cpp in place of TensorRT; test_parser.py runs the result.
#
#   build.sh PARSER HEADERS ONNX OUT
#
# PARSER: github.com/onnx/onnx-tensorrt, checked out at 8.5-GA or 8.6-GA. HEADERS: include/ of github.com/NVIDIA/TensorRT
# at 8.5.3 or v8.6.1. ONNX: the folder that holds onnx/ of ONNX 1.12 (its unpacked wheel will do: `pip download --no-deps
# --python-version 3.10 --only-binary=:all: onnx==1.12.0`). OUT: the program's path; the test wants FOLDER/recorder-8.5 and FOLDER/recorder-8.6, and FOLDER in
# MPTUNE_PARSER_RECORDERS. Needs g++, protoc and libprotobuf-dev (Debian: protobuf-compiler, libprotobuf-dev), Python 3.
set -eu
parser=$1 headers=$2 onnx=$3 out=$4
here=$(cd "$(dirname "$0")" && pwd)
work=$out.build
mkdir -p "$work/onnx"
sed /LITE_RUNTIME/d "$onnx/onnx/onnx-ml.proto" >"$work/onnx/onnx-ml.proto"  # the parser needs the whole runtime
protoc -I "$work" --cpp_out="$work" onnx/onnx-ml.proto
# All that the headers need of CUDA.
printf '#pragma once\ntypedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n' >"$work/cuda_runtime_api.h"
python3 "$here/stored.py" "$headers/NvInferImpl.h" >"$work/stored.h"

sources="$here/recorder.cpp $work/onnx/onnx-ml.pb.cc"
for name in NvOnnxParser ModelImporter builtin_op_importers onnx2trt_utils onnxErrorRecorder ImporterContext \
    ShapedWeights ShapeTensor LoopHelpers RNNHelpers OnnxAttrs ConditionalHelpers; do
    sources="$sources $parser/$name.cpp"
done
for source in $sources; do
    object=$work/$(basename "$source").o
    [ -e "$object" ] && [ "$object" -nt "$source" ] && [ "$source" != "$here/recorder.cpp" ] && continue
    echo "$source $object"
done | xargs -r -n 2 -P "${JOBS:-2}" sh -c 'exec nice -n 15 g++ -std=c++17 -O0 -w -DONNX_ML -DONNX_NAMESPACE=onnx -DSOURCE_LENGTH=0 -I"$0" -I"$1" -I"$2" -I"$3" -c "$4" -o "$5"' "$work" "$headers" "$parser" "$onnx"
g++ "$work"/*.o -lprotobuf -pthread -o "$out"
