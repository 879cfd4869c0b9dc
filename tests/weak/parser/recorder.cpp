// A network definition of TensorRT 8 that keeps what onnx-tensorrt's parser adds, and computes nothing.
//
// Prints the layers of a model's network as JSON, one a line: what they are named, what they read and make. Shapes are
// inferred as far as the parser needs them for its decisions; an unknown extent is -1. build.sh compiles it.
#include "NvOnnxParser.h"
#include "stored.h"
#include <algorithm>
#include <cctype>
#include <cstdio>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <vector>

using Ints = std::vector<int>;

static long generation = 0;
void changed() { ++generation; }  // shapes that were inferred before a layer changed are inferred again

static Ints ints(Dims const& dims) { return Ints(dims.d, dims.d + std::max(dims.nbDims, 0)); }
static Dims dims_of(Ints const& values)
{
    Dims dims{};
    dims.nbDims = int(values.size());
    for (size_t k = 0; k < values.size() && k < size_t(Dims::MAX_DIMS); ++k)
        dims.d[k] = values[k];
    return dims;
}
static Dims const UNSET{-1, {}};

struct Tensor;
struct StoredByTensor : StoredTensor
{
    bool is_input{}, is_output{};
    std::optional<DataType> type;
    std::function<Ints()> shape;
    std::function<DataType()> infer_type;
    mutable long at = -1;
    mutable Ints cached;
    Ints const& known() const
    {
        if (at != generation)
        {
            at = generation;
            cached = Ints{};  // a loop's own state reads as a scalar
            cached = shape();
        }
        return cached;
    }
    Dims getDimensions() const noexcept override { return shape ? dims_of(known()) : Dimensions_; }
    DataType getType() const noexcept override { return type ? *type : infer_type(); }
    void setType(DataType value) noexcept override { type = value; }
    bool isNetworkInput() const noexcept override { return is_input; }
    bool isNetworkOutput() const noexcept override { return is_output; }
    bool isExecutionTensor() const noexcept override { return true; }
};
struct Tensor : ITensor
{
    StoredByTensor stored;
    Tensor() { mImpl = &stored; }
};
static StoredByTensor& stored_of(ITensor* tensor) { return static_cast<Tensor*>(tensor)->stored; }

struct Base : StoredLayer
{
    LayerType type;
    std::vector<ITensor*> inputs;
    std::vector<std::unique_ptr<Tensor>> outputs;
    std::map<int, DataType> types;
    std::function<Ints(int)> values;  // of what it makes, at a depth of the recursion
    LayerType getType() const noexcept override { return type; }
    int32_t getNbInputs() const noexcept override { return int(inputs.size()); }
    int32_t getNbOutputs() const noexcept override { return int(outputs.size()); }
    ITensor* getInput(int32_t k) const noexcept override { return k < int(inputs.size()) ? inputs[k] : nullptr; }
    ITensor* getOutput(int32_t k) const noexcept override { return k < int(outputs.size()) ? outputs[k].get() : nullptr; }
    void setInput(int32_t k, ITensor& tensor) noexcept override
    {
        inputs.resize(std::max(inputs.size(), size_t(k) + 1));
        inputs[k] = &tensor;
        changed();
    }
    void setOutputType(int32_t k, DataType value) noexcept override { types[k] = value; }
    bool outputTypeIsSet(int32_t k) const noexcept override { return types.count(k); }
    DataType getOutputType(int32_t k) const noexcept override { return outputs[k]->getType(); }
    Ints in(int k) const { return ints(inputs[k]->getDimensions()); }
    bool has(int k) const { return k < int(inputs.size()) && inputs[k]; }
};

static std::vector<ILayer*> layers;
static std::map<ITensor const*, Base*> producers;
static std::map<Base*, Weights> constants;

// The values of a shape that a tensor holds: -1 where they are not constant.
static Ints values_of(ITensor* tensor, int depth = 0)
{
    Ints const shape = ints(tensor->getDimensions());
    Ints values(shape.empty() ? 1 : std::max(shape[0], 0), -1);
    auto const place = producers.find(tensor);
    if (place == producers.end() || depth > 20)
        return values;
    Base* layer = place->second;
    if (layer->type == LayerType::kSHAPE)
        return layer->in(0);
    if (layer->type == LayerType::kCONSTANT)
    {
        Weights const weights = constants[layer];
        if (weights.type == DataType::kINT32 && weights.count == int64_t(values.size()))
            values.assign((int const*) weights.values, (int const*) weights.values + weights.count);
        return values;
    }
    if (layer->type == LayerType::kCONCATENATION)
    {
        values.clear();
        for (ITensor* each : layer->inputs)
            for (int value : values_of(each, depth + 1))
                values.push_back(value);
    }
    if (layer->type == LayerType::kIDENTITY || layer->type == LayerType::kSHUFFLE || int(layer->type) == 47)  // kCAST of 8.6
    {
        Ints const same = values_of(layer->inputs[0], depth + 1);
        return same.size() == values.size() ? same : values;
    }
    if (layer->values)
        return layer->values(depth + 1);
    if (layer->type == LayerType::kGATHER)
    {
        Ints const data = values_of(layer->inputs[0], depth + 1), at = values_of(layer->inputs[1], depth + 1);
        for (size_t k = 0; k < values.size() && k < at.size(); ++k)
            if (at[k] >= 0 && at[k] < int(data.size()))
                values[k] = data[at[k]];
    }
    return values;
}

static Ints broadcast(Ints a, Ints b)
{
    if (a.size() < b.size())
        std::swap(a, b);
    size_t const more = a.size() - b.size();
    for (size_t k = 0; k < b.size(); ++k)
        if (a[more + k] == 1 || (a[more + k] < 0 && b[k] > 1))
            a[more + k] = b[k];
    return a;
}

static int combined(ElementWiseOperation operation, long a, long b)
{
    switch (operation)
    {
    case ElementWiseOperation::kSUM: return int(a + b);
    case ElementWiseOperation::kSUB: return int(a - b);
    case ElementWiseOperation::kPROD: return int(a * b);
    case ElementWiseOperation::kMAX: return int(std::max(a, b));
    case ElementWiseOperation::kMIN: return int(std::min(a, b));
    case ElementWiseOperation::kDIV:
    case ElementWiseOperation::kFLOOR_DIV: return b ? int(a / b) : -1;
    default: return -1;
    }
}

template <class I>
struct Layer : I
{
    Base base;
    Layer() { this->mLayer = &base; }
};
template <class I, class S>
struct Recorded : Layer<I>
{
    S stored;
    Recorded() { this->mImpl = &stored; }
};
struct Boundary : StoredLoopBoundaryLayer
{
    ILoop* loop{};
    ILoop* getLoop() const noexcept override { return loop; }
};
struct ConditionalBoundary : StoredConditionalBoundaryLayer
{
    IIfConditional* conditional{};
    IIfConditional* getConditional() const noexcept override { return conditional; }
};
template <class I, class S, class B>
struct Bound : Recorded<I, S>
{
    B boundary;
    Bound() { this->mBoundary = &boundary; }
};

using Shape = std::function<Ints()>;
using Type = std::function<DataType()>;

template <class L>
static L* add(L* layer, LayerType type, std::vector<ITensor*> inputs)
{
    layer->base.type = type;
    layer->base.inputs = std::move(inputs);
    layers.push_back(layer);
    layer->base.Name_ = "(Unnamed Layer* " + std::to_string(layers.size() - 1) + ") [" + name_of(type) + "]";
    return layer;
}
template <class L>
static L* output(L* layer, Shape shape, Type type = nullptr)
{
    Base* base = &layer->base;
    int const k = int(base->outputs.size());
    auto tensor = std::make_unique<Tensor>();
    tensor->stored.Name_ = base->Name_ + "_output" + (k ? "_" + std::to_string(k + 1) : "");
    tensor->stored.shape = shape ? shape : [base] { return base->in(0); };
    tensor->stored.infer_type = [base, k, type] {
        if (base->types.count(k))
            return base->types[k];
        return type ? type() : base->inputs[0]->getType();
    };
    producers[tensor.get()] = base;
    base->outputs.push_back(std::move(tensor));
    return layer;
}
static Type always(DataType type) { return [type] { return type; }; }
static Type of_input(Base& base, int k) { return [&base, k] { return base.inputs[k]->getType(); }; }

static int window(int size, int kernel, int stride, int dilation, int pad, PaddingMode mode)
{
    if (size < 0)
        return -1;
    if (mode == PaddingMode::kSAME_UPPER || mode == PaddingMode::kSAME_LOWER)
        return (size + stride - 1) / stride;
    int const room = size + pad - (dilation * (kernel - 1) + 1);
    return (mode == PaddingMode::kEXPLICIT_ROUND_UP ? (room + stride - 1) / stride : room / stride) + 1;
}
static int at(Dims const& dims, int k, int otherwise) { return k < dims.nbDims ? dims.d[k] : otherwise; }

static Ints reshaped(Base const& base, StoredShuffleLayer const& stored)
{
    Ints shape = base.in(0), moved = shape;
    for (size_t k = 0; k < shape.size(); ++k)
        moved[k] = shape[stored.FirstTranspose_.order[k]];
    Ints wanted = base.has(1) ? values_of(base.inputs[1]) : ints(stored.ReshapeDimensions_);
    if (base.has(1) || stored.ReshapeDimensions_.nbDims >= 0)
    {
        long volume = 1, others = 1;
        bool const is_known = std::all_of(moved.begin(), moved.end(), [](int each) { return each >= 0; });
        for (int each : moved)
            volume *= each;
        for (size_t k = 0; k < wanted.size(); ++k)
        {
            if (wanted[k] == 0 && stored.ZeroIsPlaceholder_ && k < moved.size())
                wanted[k] = moved[k];
            others *= wanted[k] == -1 ? 1 : wanted[k];
        }
        if (is_known && others > 0 && std::count(wanted.begin(), wanted.end(), -1) == 1)
            *std::find(wanted.begin(), wanted.end(), -1) = int(volume / others);
        moved = wanted;
    }
    Ints result = moved;
    for (size_t k = 0; k < moved.size(); ++k)
        result[k] = moved[stored.SecondTranspose_.order[k]];
    return result;
}

static Ints einsum(Base const& base, std::string text)
{
    text.erase(std::remove(text.begin(), text.end(), ' '), text.end());
    std::map<char, int> sizes;
    size_t const arrow = text.find("->");
    std::string const reads = text.substr(0, arrow);
    size_t input = 0, axis = 0;
    for (char each : reads)
        if (each == ',')
            ++input, axis = 0;
        else
            sizes[each] = base.in(int(input))[axis++];
    Ints result;
    if (arrow != std::string::npos)
        for (char each : text.substr(arrow + 2))
            result.push_back(sizes[each]);
    else
        for (auto const& [letter, size] : sizes)
            if (std::count(reads.begin(), reads.end(), letter) == 1)
                result.push_back(size);
    return result;
}

struct StoredScales : StoredResizeLayer
{
    std::vector<float> scales;
    void setScales(float const* values, int32_t count) noexcept override { scales.assign(values, values + count); changed(); }
};
struct StoredOperations : StoredMatrixMultiplyLayer
{
    MatrixOperation operations[2];
    MatrixOperation getOperation(int32_t k) const noexcept override { return operations[k]; }
    void setOperation(int32_t k, MatrixOperation value) noexcept override { operations[k] = value; changed(); }
};
struct StoredPlugin : StoredPluginV2Layer
{
    IPluginV2* plugin{};
    IPluginV2& getPlugin() noexcept override { return *plugin; }
};

struct Loop : ILoop, StoredLoop
{
    Loop() { mImpl = this; }
    template <class I, class S>
    auto* bound() { auto* layer = new Bound<I, S, Boundary>; layer->boundary.loop = this; return layer; }
    IRecurrenceLayer* addRecurrence(ITensor& initial) noexcept override
    {
        return output(add(bound<IRecurrenceLayer, StoredRecurrenceLayer>(), LayerType::kRECURRENCE, {&initial}), nullptr);
    }
    ITripLimitLayer* addTripLimit(ITensor& tensor, TripLimit) noexcept override
    {
        return add(bound<ITripLimitLayer, StoredTripLimitLayer>(), LayerType::kTRIP_LIMIT, {&tensor});
    }
    IIteratorLayer* addIterator(ITensor& tensor, int32_t axis, bool reverse) noexcept override
    {
        auto* layer = add(bound<IIteratorLayer, StoredIteratorLayer>(), LayerType::kITERATOR, {&tensor});
        layer->stored.Axis_ = axis, layer->stored.Reverse_ = reverse;
        return output(layer, [layer] {
            Ints shape = layer->base.in(0);
            shape.erase(shape.begin() + layer->stored.Axis_);
            return shape;
        });
    }
    ILoopOutputLayer* addLoopOutput(ITensor& tensor, LoopOutput kind, int32_t axis) noexcept override
    {
        auto* layer = add(bound<ILoopOutputLayer, StoredLoopOutputLayer>(), LayerType::kLOOP_OUTPUT, {&tensor});
        layer->stored.Axis_ = axis;
        return output(layer, [layer, kind] {
            Ints shape = layer->base.in(0);
            if (kind != LoopOutput::kLAST_VALUE)
                shape.insert(shape.begin() + layer->stored.Axis_, layer->base.has(1) ? values_of(layer->base.inputs[1])[0] : -1);
            return shape;
        });
    }
    void setName(char const* name) noexcept override { Name_ = name; }
    char const* getName() const noexcept override { return Name_.c_str(); }
};
struct Conditional : IIfConditional, StoredIfConditional
{
    Conditional() { mImpl = this; }
    template <class I, class S>
    auto* bound() { auto* layer = new Bound<I, S, ConditionalBoundary>; layer->boundary.conditional = this; return layer; }
    IConditionLayer* setCondition(ITensor& tensor) noexcept override
    {
        return add(bound<IConditionLayer, StoredConditionLayer>(), LayerType::kCONDITION, {&tensor});
    }
    IIfConditionalInputLayer* addInput(ITensor& tensor) noexcept override
    {
        return output(add(bound<IIfConditionalInputLayer, StoredConditionalInputLayer>(), LayerType::kCONDITIONAL_INPUT, {&tensor}), nullptr);
    }
    IIfConditionalOutputLayer* addOutput(ITensor& a, ITensor& b) noexcept override
    {
        return output(add(bound<IIfConditionalOutputLayer, StoredConditionalOutputLayer>(), LayerType::kCONDITIONAL_OUTPUT, {&a, &b}), nullptr);
    }
    void setName(char const* name) noexcept override { Name_ = name; }
    char const* getName() const noexcept override { return Name_.c_str(); }
};

struct Builder : IBuilder, StoredBuilder
{
    Builder() { mImpl = this; }
#if NV_TENSORRT_MINOR >= 6
    IPluginRegistry& getPluginRegistry() noexcept override { return *::getPluginRegistry(); }
#endif
};

#define RECORDED(NAME, TYPE, ...) add(new Recorded<I##NAME##Layer, Stored##NAME##Layer>, LayerType::TYPE, {__VA_ARGS__})

struct Network : INetworkDefinition, StoredNetworkDefinition
{
    Builder builder;
    std::vector<ITensor*> inputs, marked;
    Network() { mImpl = this; }
#if NV_TENSORRT_MINOR >= 6
    IBuilder& getBuilder() const noexcept override { return const_cast<Builder&>(builder); }
#endif
    int32_t getNbLayers() const noexcept override { return int(layers.size()); }
    ILayer* getLayer(int32_t k) const noexcept override { return layers.at(k); }
    int32_t getNbInputs() const noexcept override { return int(inputs.size()); }
    ITensor* getInput(int32_t k) const noexcept override { return inputs.at(k); }
    int32_t getNbOutputs() const noexcept override { return int(marked.size()); }
    ITensor* getOutput(int32_t k) const noexcept override { return marked.at(k); }
    bool setWeightsName(Weights, char const*) noexcept override { return true; }
    void markOutput(ITensor& tensor) noexcept override
    {
        stored_of(&tensor).is_output = true;
        marked.push_back(&tensor);
    }
    ITensor* addInput(char const* name, DataType type, Dims dimensions) noexcept override
    {
        auto* tensor = new Tensor;
        tensor->stored.Name_ = name, tensor->stored.type = type, tensor->stored.Dimensions_ = dimensions;
        tensor->stored.is_input = true;
        inputs.push_back(tensor);
        return tensor;
    }

    // What gives its first input's shape and type.
    IActivationLayer* addActivation(ITensor& x, ActivationType) noexcept override { return output(RECORDED(Activation, kACTIVATION, &x), nullptr); }
    ILRNLayer* addLRN(ITensor& x, int32_t, float, float, float) noexcept override { return output(RECORDED(LRN, kLRN, &x), nullptr); }
    IScaleLayer* addScale(ITensor& x, ScaleMode, Weights, Weights, Weights) noexcept override { return output(RECORDED(Scale, kSCALE, &x), nullptr); }
    IScaleLayer* addScaleNd(ITensor& x, ScaleMode, Weights, Weights, Weights, int32_t) noexcept override { return output(RECORDED(Scale, kSCALE, &x), nullptr); }
    ISoftMaxLayer* addSoftMax(ITensor& x) noexcept override { return output(RECORDED(SoftMax, kSOFTMAX, &x), nullptr); }
    IRaggedSoftMaxLayer* addRaggedSoftMax(ITensor& x, ITensor& y) noexcept override { return output(RECORDED(RaggedSoftMax, kRAGGED_SOFTMAX, &x, &y), nullptr); }
    IIdentityLayer* addIdentity(ITensor& x) noexcept override { return output(RECORDED(Identity, kIDENTITY, &x), nullptr); }
    IParametricReLULayer* addParametricReLU(ITensor& x, ITensor& y) noexcept override { return output(RECORDED(ParametricReLU, kPARAMETRIC_RELU, &x, &y), nullptr); }
    IScatterLayer* addScatter(ITensor& x, ITensor& y, ITensor& z, ScatterMode) noexcept override { return output(RECORDED(Scatter, kSCATTER, &x, &y, &z), nullptr); }
    IUnaryLayer* addUnary(ITensor& x, UnaryOperation operation) noexcept override
    {
        auto* layer = RECORDED(Unary, kUNARY, &x);
        bool const is_test = operation == UnaryOperation::kNOT || int(operation) == 23;  // kISINF of 8.6
        return output(layer, nullptr, is_test ? always(DataType::kBOOL) : of_input(layer->base, 0));
    }
    IDequantizeLayer* addDequantize(ITensor& x, ITensor& y) noexcept override { return output(RECORDED(Dequantize, kDEQUANTIZE, &x, &y), nullptr, always(DataType::kFLOAT)); }
    IQuantizeLayer* addQuantize(ITensor& x, ITensor& y) noexcept override { return output(RECORDED(Quantize, kQUANTIZE, &x, &y), nullptr, always(DataType::kINT8)); }
    IPluginV2Layer* addPluginV2(ITensor* const* tensors, int32_t count, IPluginV2& plugin) noexcept override
    {
        auto* layer = new Recorded<IPluginV2Layer, StoredPlugin>;
        layer->stored.plugin = &plugin;
        return output(add(layer, LayerType::kPLUGIN_V2, {tensors, tensors + count}), nullptr);
    }
#if NV_TENSORRT_MINOR >= 6
    IReverseSequenceLayer* addReverseSequence(ITensor& x, ITensor& y) noexcept override { return output(RECORDED(ReverseSequence, kREVERSE_SEQUENCE, &x, &y), nullptr); }
    INormalizationLayer* addNormalization(ITensor& x, ITensor& y, ITensor& z, uint32_t) noexcept override { return output(RECORDED(Normalization, kNORMALIZATION, &x, &y, &z), nullptr); }
    ICastLayer* addCast(ITensor& x, DataType type) noexcept override { return output(RECORDED(Cast, kCAST, &x), nullptr, always(type)); }
#endif

    IConvolutionLayer* addConvolutionNd(ITensor& x, int32_t maps, Dims kernel, Weights, Weights) noexcept override
    {
        auto* layer = RECORDED(Convolution, kCONVOLUTION, &x);
        layer->stored.NbOutputMaps_ = maps, layer->stored.KernelSizeNd_ = kernel;
        return output(layer, [layer] {
            auto const& s = layer->stored;
            Ints shape = layer->base.in(0);
            shape[1] = s.NbOutputMaps_;
            for (int k = 0; k + 2 < int(shape.size()); ++k)
                shape[k + 2] = window(shape[k + 2], s.KernelSizeNd_.d[k], at(s.StrideNd_, k, 1), at(s.DilationNd_, k, 1),
                    at(s.PrePadding_, k, 0) + at(s.PostPadding_, k, 0), s.PaddingMode_);
            return shape;
        });
    }
    IPoolingLayer* addPoolingNd(ITensor& x, PoolingType, Dims kernel) noexcept override
    {
        auto* layer = RECORDED(Pooling, kPOOLING, &x);
        layer->stored.WindowSizeNd_ = kernel;
        return output(layer, [layer] {
            auto const& s = layer->stored;
            Ints shape = layer->base.in(0);
            for (int k = 0; k < s.WindowSizeNd_.nbDims; ++k)
            {
                int& size = shape[shape.size() - s.WindowSizeNd_.nbDims + k];
                size = window(size, s.WindowSizeNd_.d[k], at(s.StrideNd_, k, 1), 1, at(s.PrePadding_, k, 0) + at(s.PostPadding_, k, 0), s.PaddingMode_);
            }
            return shape;
        });
    }
    IDeconvolutionLayer* addDeconvolutionNd(ITensor& x, int32_t maps, Dims kernel, Weights, Weights) noexcept override
    {
        auto* layer = RECORDED(Deconvolution, kDECONVOLUTION, &x);
        layer->stored.NbOutputMaps_ = maps, layer->stored.KernelSizeNd_ = kernel;
        return output(layer, [layer] {
            auto const& s = layer->stored;
            Ints shape = layer->base.in(0);
            shape[1] = s.NbOutputMaps_;
            bool const is_same = s.PaddingMode_ == PaddingMode::kSAME_UPPER || s.PaddingMode_ == PaddingMode::kSAME_LOWER;
            for (int k = 0; k + 2 < int(shape.size()); ++k)
            {
                int const stride = at(s.StrideNd_, k, 1), size = shape[k + 2];
                int const whole = (size - 1) * stride + at(s.DilationNd_, k, 1) * (s.KernelSizeNd_.d[k] - 1) + 1;
                shape[k + 2] = size < 0 ? -1 : is_same ? size * stride : whole - at(s.PrePadding_, k, 0) - at(s.PostPadding_, k, 0);
            }
            return shape;
        });
    }
    IFullyConnectedLayer* addFullyConnected(ITensor& x, int32_t count, Weights, Weights) noexcept override
    {
        auto* layer = RECORDED(FullyConnected, kFULLY_CONNECTED, &x);
        return output(layer, [layer, count] {
            Ints shape = layer->base.in(0);
            for (size_t k = shape.size() - 3; k < shape.size(); ++k)
                shape[k] = k == shape.size() - 3 ? count : 1;
            return shape;
        });
    }
    IConcatenationLayer* addConcatenation(ITensor* const* tensors, int32_t count) noexcept override
    {
        auto* layer = add(new Recorded<IConcatenationLayer, StoredConcatenationLayer>, LayerType::kCONCATENATION, {tensors, tensors + count});
        layer->stored.Axis_ = std::max(int(layer->base.in(0).size()) - 3, 0);
        return output(layer, [layer] {
            Ints shape = layer->base.in(0);
            int& size = shape[layer->stored.Axis_];
            for (int k = 1; k < int(layer->base.inputs.size()); ++k)
            {
                int const more = layer->base.in(k)[layer->stored.Axis_];
                size = size < 0 || more < 0 ? -1 : size + more;
            }
            return shape;
        });
    }
    IElementWiseLayer* addElementWise(ITensor& x, ITensor& y, ElementWiseOperation operation) noexcept override
    {
        auto* layer = RECORDED(ElementWise, kELEMENTWISE, &x, &y);
        bool const is_test = operation >= ElementWiseOperation::kAND;
        layer->base.values = [layer, operation](int depth) {
            Ints a = values_of(layer->base.inputs[0], depth), b = values_of(layer->base.inputs[1], depth);
            a.resize(std::max(a.size(), b.size()), a.empty() ? -1 : a[0]);
            b.resize(a.size(), b.empty() ? -1 : b[0]);
            for (size_t k = 0; k < a.size(); ++k)
                a[k] = a[k] < 0 || b[k] < 0 ? -1 : combined(operation, a[k], b[k]);
            return a;
        };
        return output(layer, [layer] { return broadcast(layer->base.in(0), layer->base.in(1)); },
            is_test ? always(DataType::kBOOL) : of_input(layer->base, 0));
    }
    IShuffleLayer* addShuffle(ITensor& x) noexcept override
    {
        auto* layer = RECORDED(Shuffle, kSHUFFLE, &x);
        for (int k = 0; k < Dims::MAX_DIMS; ++k)
            layer->stored.FirstTranspose_.order[k] = layer->stored.SecondTranspose_.order[k] = k;
        layer->stored.ReshapeDimensions_ = UNSET, layer->stored.ZeroIsPlaceholder_ = true;
        return output(layer, [layer] { return reshaped(layer->base, layer->stored); });
    }
    IReduceLayer* addReduce(ITensor& x, ReduceOperation, uint32_t axes, bool keep) noexcept override
    {
        auto* layer = RECORDED(Reduce, kREDUCE, &x);
        layer->stored.ReduceAxes_ = axes, layer->stored.KeepDimensions_ = keep;
        return output(layer, [layer] {
            Ints shape;
            Ints const whole = layer->base.in(0);
            for (size_t k = 0; k < whole.size(); ++k)
                if (!(layer->stored.ReduceAxes_ >> k & 1))
                    shape.push_back(whole[k]);
                else if (layer->stored.KeepDimensions_)
                    shape.push_back(1);
            return shape;
        });
    }
    ITopKLayer* addTopK(ITensor& x, TopKOperation, int32_t count, uint32_t axes) noexcept override
    {
        auto* layer = RECORDED(TopK, kTOPK, &x);
        layer->stored.K_ = count, layer->stored.ReduceAxes_ = axes;
        auto const shape = [layer] {
            Ints whole = layer->base.in(0);
            for (size_t k = 0; k < whole.size(); ++k)
                if (layer->stored.ReduceAxes_ >> k & 1)
                    whole[k] = layer->base.has(1) ? values_of(layer->base.inputs[1])[0] : layer->stored.K_;
            return whole;
        };
        return output(output(layer, shape), shape, always(DataType::kINT32));
    }
    IGatherLayer* addGather(ITensor& data, ITensor& indices, int32_t axis) noexcept override
    {
        auto* layer = static_cast<Recorded<IGatherLayer, StoredGatherLayer>*>(addGatherV2(data, indices, GatherMode::kDEFAULT));
        layer->stored.GatherAxis_ = axis;
        return layer;
    }
    IGatherLayer* addGatherV2(ITensor& data, ITensor& indices, GatherMode mode) noexcept override
    {
        auto* layer = RECORDED(Gather, kGATHER, &data, &indices);
        layer->stored.Mode_ = mode;
        return output(layer, [layer] {
            Ints const whole = layer->base.in(0), at = layer->base.in(1);
            auto const& s = layer->stored;
            if (s.Mode_ == GatherMode::kELEMENT)
                return at;
            bool const is_nd = s.Mode_ == GatherMode::kND;
            int const from = is_nd ? s.NbElementWiseDims_ + at.back() : s.GatherAxis_ + 1;
            Ints shape(whole.begin(), whole.begin() + (is_nd ? 0 : s.GatherAxis_));
            shape.insert(shape.end(), at.begin() + (is_nd ? 0 : s.NbElementWiseDims_), at.end() - is_nd);
            shape.insert(shape.end(), whole.begin() + from, whole.end());
            return shape;
        });
    }
    IMatrixMultiplyLayer* addMatrixMultiply(ITensor& x, MatrixOperation a, ITensor& y, MatrixOperation b) noexcept override
    {
        auto* layer = add(new Recorded<IMatrixMultiplyLayer, StoredOperations>, LayerType::kMATRIX_MULTIPLY, {&x, &y});
        layer->stored.operations[0] = a, layer->stored.operations[1] = b;
        return output(layer, [layer] {
            Ints batch[2], tail;
            for (int k = 0; k < 2; ++k)
            {
                Ints const shape = layer->base.in(k);
                auto const operation = layer->stored.operations[k];
                bool const is_vector = operation == MatrixOperation::kVECTOR;
                batch[k] = Ints(shape.begin(), shape.end() - (is_vector ? 1 : 2));
                if (!is_vector)
                    tail.push_back(shape[shape.size() - ((operation == MatrixOperation::kTRANSPOSE) == (k == 0) ? 1 : 2)]);
            }
            Ints shape = broadcast(batch[0], batch[1]);
            shape.insert(shape.end(), tail.begin(), tail.end());
            return shape;
        });
    }
    IConstantLayer* addConstant(Dims dimensions, Weights weights) noexcept override
    {
        auto* layer = RECORDED(Constant, kCONSTANT);
        layer->stored.Dimensions_ = dimensions, layer->stored.Weights_ = weights;
        constants[&layer->base] = weights;
        return output(layer, [layer] { return ints(layer->stored.Dimensions_); }, always(weights.type));
    }
    ISliceLayer* addSlice(ITensor& x, Dims start, Dims size, Dims stride) noexcept override
    {
        auto* layer = RECORDED(Slice, kSLICE, &x);
        layer->stored.Start_ = start, layer->stored.Size_ = size, layer->stored.Stride_ = stride;
        layer->base.values = [layer](int depth) {
            auto const given = [layer, depth](int k, Dims const& dims) { return layer->base.has(k) ? values_of(layer->base.inputs[k], depth) : ints(dims); };
            auto const& s = layer->stored;
            Ints const data = values_of(layer->base.inputs[0], depth), from = given(1, s.Start_), count = given(2, s.Size_), step = given(3, s.Stride_);
            Ints values(count.empty() ? 0 : std::max(count[0], 0), -1);
            for (size_t k = 0; k < values.size(); ++k)
            {
                long const place = from[0] + long(k) * step[0];
                if (from[0] >= 0 && place >= 0 && place < long(data.size()))
                    values[k] = data[place];
            }
            return values;
        };
        return output(layer, [layer] { return layer->base.has(2) ? values_of(layer->base.inputs[2]) : ints(layer->stored.Size_); });
    }
    IShapeLayer* addShape(ITensor& x) noexcept override
    {
        auto* layer = RECORDED(Shape, kSHAPE, &x);
        return output(layer, [layer] { return Ints{int(layer->base.in(0).size())}; }, always(DataType::kINT32));
    }
    IResizeLayer* addResize(ITensor& x) noexcept override
    {
        auto* layer = add(new Recorded<IResizeLayer, StoredScales>, LayerType::kRESIZE, {&x});
        layer->stored.OutputDimensions_ = UNSET;
        return output(layer, [layer] {
            auto const& s = layer->stored;
            if (layer->base.has(1))
                return values_of(layer->base.inputs[1]);
            if (s.OutputDimensions_.nbDims >= 0)
                return ints(s.OutputDimensions_);
            Ints shape = layer->base.in(0);
            for (size_t k = 0; k < shape.size() && k < s.scales.size(); ++k)
                shape[k] = shape[k] < 0 ? -1 : int(shape[k] * s.scales[k]);
            return shape;
        });
    }
    ISelectLayer* addSelect(ITensor& condition, ITensor& x, ITensor& y) noexcept override
    {
        auto* layer = RECORDED(Select, kSELECT, &condition, &x, &y);
        return output(layer, [layer] { return broadcast(broadcast(layer->base.in(0), layer->base.in(1)), layer->base.in(2)); },
            of_input(layer->base, 1));
    }
    IFillLayer* addFill(Dims dimensions, FillOperation operation) noexcept override
    {
        auto* layer = RECORDED(Fill, kFILL);
        layer->stored.Dimensions_ = dimensions;
        return output(layer, [layer] { return layer->base.has(0) ? values_of(layer->base.inputs[0]) : ints(layer->stored.Dimensions_); },
            [layer] { return layer->base.has(1) ? layer->base.inputs[1]->getType() : DataType::kFLOAT; });
    }
    IEinsumLayer* addEinsum(ITensor* const* tensors, int32_t count, char const* equation) noexcept override
    {
        auto* layer = add(new Recorded<IEinsumLayer, StoredEinsumLayer>, LayerType::kEINSUM, {tensors, tensors + count});
        return output(layer, [layer, text = std::string(equation)] { return einsum(layer->base, text); });
    }
    IAssertionLayer* addAssertion(ITensor& condition, char const*) noexcept override { return RECORDED(Assertion, kASSERTION, &condition); }
    IOneHotLayer* addOneHot(ITensor& indices, ITensor& values, ITensor& depth, int32_t axis) noexcept override
    {
        auto* layer = RECORDED(OneHot, kONE_HOT, &indices, &values, &depth);
        layer->stored.Axis_ = axis;
        return output(layer, [layer] {
            Ints shape = layer->base.in(0);
            int const place = layer->stored.Axis_ < 0 ? int(shape.size()) + 1 + layer->stored.Axis_ : layer->stored.Axis_;
            shape.insert(shape.begin() + place, values_of(layer->base.inputs[2])[0]);
            return shape;
        }, of_input(layer->base, 1));
    }
    INonZeroLayer* addNonZero(ITensor& x) noexcept override
    {
        auto* layer = RECORDED(NonZero, kNON_ZERO, &x);
        return output(layer, [layer] { return Ints{int(layer->base.in(0).size()), -1}; }, always(DataType::kINT32));
    }
    IGridSampleLayer* addGridSample(ITensor& x, ITensor& grid) noexcept override
    {
        auto* layer = RECORDED(GridSample, kGRID_SAMPLE, &x, &grid);
        return output(layer, [layer] {
            Ints shape = layer->base.in(0);
            for (size_t k = 2; k < shape.size(); ++k)
                shape[k] = layer->base.in(1)[k - 1];
            return shape;
        });
    }
    INMSLayer* addNMS(ITensor& boxes, ITensor& scores, ITensor& limit) noexcept override
    {
        auto* layer = RECORDED(NMS, kNMS, &boxes, &scores, &limit);
        return output(output(layer, [] { return Ints{-1, 3}; }, always(DataType::kINT32)), [] { return Ints{}; }, always(DataType::kINT32));
    }
    IIfConditional* addIfConditional() noexcept override { return new Conditional; }
    ILoop* addLoop() noexcept override { return new ::Loop; }
};

// No plugin is registered here: a model that needs one is refused, by name.
struct Registry : IPluginRegistry
{
    bool registerCreator(IPluginCreator&, char const*) noexcept override { return false; }
    IPluginCreator* const* getPluginCreatorList(int32_t* count) const noexcept override { *count = 0; return nullptr; }
    IPluginCreator* getPluginCreator(char const*, char const*, char const*) noexcept override { return nullptr; }
    void setErrorRecorder(IErrorRecorder*) noexcept override {}
    IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
    bool deregisterCreator(IPluginCreator const&) noexcept override { return false; }
#if NV_TENSORRT_MINOR >= 6
    bool isParentSearchEnabled() const override { return false; }
    void setParentSearchEnabled(bool) override {}
    PluginLibraryHandle loadLibrary(char const*) noexcept override { return nullptr; }
    void deregisterLibrary(PluginLibraryHandle) noexcept override {}
#endif
};
extern "C" nvinfer1::IPluginRegistry* getPluginRegistry() noexcept
{
    static Registry registry;
    return &registry;
}
extern "C" nvinfer1::IPluginRegistry* getBuilderPluginRegistry(EngineCapability) noexcept { return getPluginRegistry(); }
extern "C" bool initLibNvInferPlugins(void*, char const*) { return true; }
extern "C" int32_t getInferLibVersion() noexcept { return NV_TENSORRT_VERSION; }

static std::string quoted(std::string const& text)
{
    std::string result = "\"";
    for (unsigned char each : text)
    {
        char escape[8];
        std::snprintf(escape, sizeof escape, "\\u%04x", each);
        if (each < 32 || each == '"' || each == '\\')
            result += escape;
        else
            result += char(each);
    }
    return result + "\"";
}
static std::string described(ITensor* tensor)
{
    if (!tensor)
        return "null";
    static char const* const types[] = {"FLOAT", "HALF", "INT8", "INT32", "BOOL", "UINT8"};
    std::string shape;
    for (int each : ints(tensor->getDimensions()))
        shape += (shape.empty() ? "" : ",") + std::to_string(each);
    return "{\"name\": " + quoted(tensor->getName()) + ", \"dtype\": \"" + types[int(tensor->getType())] + "\", \"shape\": [" + shape
        + "], \"is_output\": " + (tensor->isNetworkOutput() ? "true" : "false") + "}";
}

struct Log : ILogger
{
    void log(Severity severity, char const* text) noexcept override
    {
        if (severity <= Severity::kERROR)
            std::cerr << text << "\n";
    }
};

int main(int, char** arguments)
{
    Log log;
    Network network;
    auto* parser = nvonnxparser::createParser(network, log);
    bool const is_parsed = parser->parseFromFile(arguments[1], int(ILogger::Severity::kERROR));
    for (ILayer* layer : layers)
    {
#if NV_TENSORRT_MINOR >= 6
        std::string const metadata = layer->getMetadata();
#else
        std::string const metadata;
#endif
        std::string line = "{\"name\": " + quoted(layer->getName()) + ", \"metadata\": " + quoted(metadata) + ", \"type\": \"" + name_of(layer->getType()) + "\", \"inputs\": [";
        for (int k = 0; k < layer->getNbInputs(); ++k)
            line += (k ? ", " : "") + described(layer->getInput(k));
        line += "], \"outputs\": [";
        for (int k = 0; k < layer->getNbOutputs(); ++k)
            line += (k ? ", " : "") + described(layer->getOutput(k));
        std::cout << line << "]}\n";
    }
    return is_parsed ? 0 : 1;
}
