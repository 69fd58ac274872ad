//! Quantized tensors are those of TransformerEngine, bit for bit: the cases of `tests/golden/quant`.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use ir::quant::block_gemm::{Operand, block_gemm};
use ir::quant::blocks::Blocks;
use ir::quant::delayed::{AmaxAlgo, Delayed};
use ir::quant::format::{pack, unpack};
use ir::quant::layout::{row_blocks, square_blocks, swizzled, transposed, unswizzled};
use ir::quant::nvfp4::{self, Level};
use ir::quant::scale::{ScaleRule, amax, dequantize, quantize};
use ir::quant::{Format, mx};
use safetensors::{Dtype, SafeTensors};
use serde::Deserialize;
use serde_json::Value;

/// The cases of each family that the manifest lists, so that none is lost in silence.
const CASES: &[(&str, usize)] = &[
    ("block_1d", 14),
    ("block_2d", 14),
    ("cast", 6),
    ("current_scaling", 56),
    ("delayed_cast", 21),
    ("delayed_update", 76),
    ("gemm", 4),
    // Rows of fused weights, not quantization.
    ("layout", 11),
    ("mxfp8", 17),
    ("nvfp4", 17),
    ("nvfp4_sr", 1),
    ("sharded_quant", 8),
];

#[derive(Deserialize)]
struct Manifest {
    cases: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    name: String,
    family: String,
    file: String,
    params: Value,
    inputs: BTreeMap<String, String>,
    expected: BTreeMap<String, String>,
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("golden/quant").join(name)
}

fn cases() -> Vec<Entry> {
    let text = std::fs::read_to_string(golden("manifest.json")).unwrap();
    serde_json::from_str::<Manifest>(&text).unwrap().cases
}

/// A case with its tensors, which remembers what was compared.
struct Case<'a> {
    entry: &'a Entry,
    tensors: &'a SafeTensors<'a>,
    read: RefCell<BTreeSet<String>>,
}

/// Compares all cases of a family, each in all tensors it expects.
fn check(family: &str, compare: impl Fn(&Case)) {
    let entries: Vec<Entry> = cases().into_iter().filter(|it| it.family == family).collect();
    assert!(!entries.is_empty(), "no case of {family}");
    let bytes = std::fs::read(golden(&entries[0].file)).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    for entry in &entries {
        let case = Case { entry, tensors: &tensors, read: RefCell::default() };
        compare(&case);
        let read = case.read.into_inner();
        let missed: Vec<_> = entry.expected.keys().filter(|&it| !read.contains(it)).collect();
        assert!(missed.is_empty(), "{}: nothing was compared with {missed:?}", entry.name);
    }
}

impl Case<'_> {
    fn param(&self, name: &str) -> &Value {
        &self.entry.params[name]
    }

    fn format(&self) -> Format {
        match self.param("fmt").as_str() {
            Some("e4m3") => Format::E4M3,
            Some("e5m2") => Format::E5M2,
            other => panic!("{}: format {other:?}", self.entry.name),
        }
    }

    fn has(&self, role: &str) -> bool {
        self.entry.expected.contains_key(role)
    }

    fn tensor(&self, role: &str) -> safetensors::tensor::TensorView<'_> {
        self.read.borrow_mut().insert(role.to_string());
        let key = self.entry.inputs.get(role).or_else(|| self.entry.expected.get(role));
        self.tensors.tensor(key.unwrap_or_else(|| panic!("{}: {role}", self.entry.name))).unwrap()
    }

    fn bytes(&self, role: &str) -> Vec<u8> {
        assert_eq!(self.tensor(role).dtype(), Dtype::U8, "{}: {role}", self.entry.name);
        self.tensor(role).data().to_vec()
    }

    fn floats(&self, role: &str) -> Vec<f32> {
        let tensor = self.tensor(role);
        let pairs = || tensor.data().as_chunks().0.iter().copied();
        match tensor.dtype() {
            Dtype::F32 => {
                tensor.data().as_chunks().0.iter().map(|it| f32::from_le_bytes(*it)).collect()
            }
            Dtype::BF16 => pairs().map(|it| bf16::from_le_bytes(it).to_f32()).collect(),
            Dtype::F16 => pairs().map(|it| f16::from_le_bytes(it).to_f32()).collect(),
            other => panic!("{}: {role} is {other:?}", self.entry.name),
        }
    }

    fn float(&self, role: &str) -> f32 {
        let [res] = self.floats(role)[..] else { panic!("{}: {role}", self.entry.name) };
        res
    }

    fn ints(&self, role: &str) -> Vec<i32> {
        let tensor = self.tensor(role);
        assert_eq!(tensor.dtype(), Dtype::I32);
        tensor.data().as_chunks().0.iter().map(|it| i32::from_le_bytes(*it)).collect()
    }

    fn matrix(&self, role: &str) -> (Vec<f32>, usize, usize) {
        let [rows, cols] = self.tensor(role).shape()[..] else {
            panic!("{}: {role}", self.entry.name)
        };
        (self.floats(role), rows, cols)
    }

    /// The largest number of an input's type.
    fn dtype_max(&self, role: &str) -> f32 {
        match self.tensor(role).dtype() {
            Dtype::BF16 => bf16::MAX.to_f32(),
            Dtype::F16 => f16::MAX.to_f32(),
            _ => f32::MAX,
        }
    }

    fn expect_floats(&self, role: &str, found: &[f32]) {
        let expect = self.floats(role);
        assert_eq!(found.len(), expect.len(), "{}: {role}", self.entry.name);
        for (i, (a, b)) in found.iter().zip(&expect).enumerate() {
            let same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            assert!(same, "{}: {role}[{i}] is {a:e} and not {b:e}", self.entry.name);
        }
    }

    fn expect_codes(&self, role: &str, found: &[u8], format: Format) {
        let expect = self.bytes(role);
        assert_eq!(found.len(), expect.len(), "{}: {role}", self.entry.name);
        for (i, (&a, &b)) in found.iter().zip(&expect).enumerate() {
            let same = a == b || format.decode(a).is_nan() && format.decode(b).is_nan();
            assert!(same, "{}: {role}[{i}] is {a:02x} and not {b:02x}", self.entry.name);
        }
    }

    fn expect_bytes(&self, role: &str, found: &[u8]) {
        assert_eq!(found, self.bytes(role), "{}: {role}", self.entry.name);
    }
}

fn codes(x: &[f32], format: Format) -> Vec<u8> {
    quantize(x, 1.0, format)
}

fn numbers(codes: &[u8], format: Format) -> Vec<f32> {
    dequantize(codes, 1.0, format)
}

fn inverse(x: &[f32]) -> Vec<f32> {
    x.iter().map(|it| 1.0 / it).collect()
}

#[test]
fn the_manifest_lists_these_cases() {
    let mut found = BTreeMap::new();
    for case in cases() {
        *found.entry(case.family).or_insert(0) += 1;
    }
    let expect = CASES.iter().map(|&(family, n)| (family.to_string(), n));
    assert_eq!(found, expect.collect::<BTreeMap<_, usize>>());
    assert_eq!(found.values().sum::<usize>(), 245);
}

#[test]
fn elements_are_rounded_like_hardware_does() {
    check("cast", |case| match &case.entry.name[..] {
        "cast_fp8_e4m3" | "cast_fp8_e5m2" => {
            case.expect_codes("code", &codes(&case.floats("v"), case.format()), case.format());
        }
        "decode_fp8_e5m2" => case.expect_floats("v", &numbers(&case.bytes("code"), Format::E5M2)),
        "cast_fp4_e2m1" => {
            let found = codes(&case.floats("v"), Format::E2M1);
            case.expect_bytes("packed", &pack(&found));
            assert_eq!(unpack(&pack(&found)), found);
        }
        "cast_e8m0_ceil" => {
            case.expect_codes("code", &codes(&case.floats("v"), Format::E8M0), Format::E8M0);
        }
        "decode_e8m0" => {
            let found = numbers(&case.bytes("code"), Format::E8M0);
            case.expect_floats("value", &found);
            case.expect_floats("reciprocal", &inverse(&found));
        }
        other => panic!("{other} is a new kind of case"),
    });
}

#[test]
fn current_scaling_is_that_of_the_tensor() {
    check("current_scaling", |case| {
        let (x, format) = (case.floats("x"), case.format());
        let pow2 = case.param("pow2") == true;
        let eps = case.param("amax_epsilon").as_f64().unwrap_or(0.0) as f32;
        let amax = match case.param("given_amax").as_f64() {
            Some(given) => given as f32,
            None => {
                case.expect_floats("amax", &[amax(&x)]);
                amax(&x)
            }
        };
        let scale = ScaleRule { pow2, eps, ..ScaleRule::tensor(format) }.scale(amax);
        case.expect_floats("scale", &[scale]);
        case.expect_floats("scale_inv", &[1.0 / scale]);
        case.expect_codes("q", &quantize(&x, scale, format), format);
    });
}

#[test]
fn delayed_scaling_casts_with_the_scale_it_is_given() {
    check("delayed_cast", |case| {
        let (x, scale, format) = (case.floats("x"), case.float("scale"), case.format());
        case.expect_codes("q", &quantize(&x, scale, format), format);
        case.expect_floats("amax", &[amax(&x)]);
        case.expect_floats("scale_inv", &[1.0 / scale]);
    });
}

#[test]
fn delayed_scales_follow_the_fused_kernel() {
    check("delayed_update", |case| {
        let n_steps = case.param("amax_history_len").as_u64().unwrap() as usize;
        let algo = match case.param("amax_compute_algo").as_str() {
            Some("max") => AmaxAlgo::Max,
            Some("most_recent") => AmaxAlgo::MostRecent,
            other => panic!("algorithm {other:?}"),
        };
        let max = case.param("fp8_max").as_f64().unwrap() as f32;
        let format =
            [Format::E4M3, Format::E5M2].into_iter().find(|&it| Format::max(it) == max).unwrap();
        let margin = case.param("margin").as_i64().unwrap() as i32;
        let rule = Delayed { format, margin, algo };
        let mut scale = case.param("initial_scale").as_f64().unwrap() as f32;

        let mut history = vec![0.0; n_steps];
        let (mut scales, mut histories) = (Vec::new(), Vec::new());
        for amax in case.floats("amax_per_step") {
            scale = rule.update(&mut history, amax, scale);
            scales.push(scale);
            histories.extend_from_slice(&history);
        }
        case.expect_floats("scale_fused", &scales);
        case.expect_floats("history_fused", &histories);
        // Read, but not expected: the other path differs by design.
        case.read.borrow_mut().extend(["scale_unfused", "history_unfused"].map(String::from));
    });
}

/// Codes and inverse scales of blocks of FP8.
fn block_quantized(x: &[f32], blocks: Blocks, rule: ScaleRule) -> (Vec<u8>, Vec<f32>) {
    let scales: Vec<f32> = blocks.amax(x).into_iter().map(|it| rule.scale(it)).collect();
    (blocks.quantize(x, &scales, rule.format), inverse(&scales))
}

fn block_rule(case: &Case) -> ScaleRule {
    let (pow2, overflow) = (case.param("pow2") == true, case.dtype_max("x"));
    ScaleRule { pow2, overflow, ..ScaleRule::tensor(case.format()) }
}

#[test]
fn rows_and_columns_are_scaled_in_blocks_of_128() {
    check("block_1d", |case| {
        let ((x, rows, cols), rule) = (case.matrix("x"), block_rule(case));
        let blocks = Blocks { rows, cols, block: [1, 128] };
        let (q, scale_inv) = block_quantized(&x, blocks, rule);
        case.expect_codes("q", &q, rule.format);
        case.expect_floats("scale_inv", &scale_inv);
        if case.has("scale_inv_gemm_ready") {
            let [rows, cols] = blocks.grid();
            case.expect_floats("scale_inv_gemm_ready", &row_blocks(&scale_inv, rows, cols));
        }

        let of_transposed = Blocks { rows: cols, cols: rows, block: [1, 128] };
        let (q, scale_inv) = block_quantized(&transposed(&x, rows, cols), of_transposed, rule);
        case.expect_codes("q_t", &q, rule.format);
        case.expect_floats("scale_inv_t", &scale_inv);

        // The column blocks of the matrix itself hold the same.
        let column = Blocks { block: [128, 1], ..blocks };
        let (q_col, scale_inv_col) = block_quantized(&x, column, rule);
        case.expect_codes("q_t", &transposed(&q_col, rows, cols), rule.format);
        let [n_rows, n_cols] = column.grid();
        case.expect_floats("scale_inv_t", &transposed(&scale_inv_col, n_rows, n_cols));
    });
}

#[test]
fn weights_are_scaled_in_blocks_of_128_x_128() {
    check("block_2d", |case| {
        let ((x, rows, cols), rule) = (case.matrix("x"), block_rule(case));
        let blocks = Blocks { rows, cols, block: [128, 128] };
        let (q, scale_inv) = block_quantized(&x, blocks, rule);
        case.expect_codes("q", &q, rule.format);
        case.expect_floats("scale_inv", &scale_inv);
        if case.has("scale_inv_gemm_ready") {
            let [rows, cols] = blocks.grid();
            case.expect_floats("scale_inv_gemm_ready", &square_blocks(&scale_inv, rows, cols));
        }
    });
}

/// Codes and codes of scales of blocks of MXFP8.
fn mx_quantized(x: &[f32], blocks: Blocks, format: Format) -> (Vec<u8>, Vec<u8>) {
    let scale_inv: Vec<f32> =
        blocks.amax(x).into_iter().map(|it| mx::scale_inv(it, format)).collect();
    (blocks.quantize(x, &inverse(&scale_inv), format), codes(&scale_inv, Format::E8M0))
}

#[test]
fn mxfp8_has_a_power_of_two_for_each_32_elements() {
    check("mxfp8", |case| {
        let ((x, rows, cols), format) = (case.matrix("x"), case.format());
        let of = |block| Blocks { rows, cols, block };
        if case.param("two_d") == true {
            let (q, scales) = mx_quantized(&x, of([32, 32]), format);
            case.expect_codes("q", &q, format);
            case.expect_codes("q_col", &q, format);
            case.expect_bytes("scale_e8m0", &of([32, 32]).refined(&scales, [1, 32]));
            case.expect_bytes("scale_e8m0_col", &of([32, 32]).refined(&scales, [32, 1]));
            return;
        }
        let (q, row_scales) = mx_quantized(&x, of([1, 32]), format);
        case.expect_codes("q", &q, format);
        case.expect_bytes("scale_e8m0", &row_scales);
        let (q, col_scales) = mx_quantized(&x, of([32, 1]), format);
        case.expect_codes("q_col", &q, format);
        case.expect_bytes("scale_e8m0_col", &col_scales);
        if case.has("scale_swizzled_row") {
            let [n, m] = of([1, 32]).grid();
            case.expect_bytes("scale_swizzled_row", &swizzled(&row_scales, n, m));
            assert_eq!(unswizzled(&case.bytes("scale_swizzled_row"), n, m), row_scales);
            let [n, m] = of([32, 1]).grid();
            let columns = transposed(&col_scales, n, m);
            case.expect_bytes("scale_swizzled_col", &swizzled(&columns, m, n));
        }
    });
}

/// Codes, not packed, and scales of blocks of NVFP4.
fn nv_quantized(x: &[f32], blocks: Blocks) -> (Vec<u8>, Vec<f32>) {
    let level = Level::new(amax(x));
    let scales: Vec<f32> = blocks.amax(x).into_iter().map(|it| level.scale(it)).collect();
    let factors: Vec<f32> = scales.iter().map(|&it| level.factor(it)).collect();
    (blocks.quantize(x, &factors, Format::E2M1), scales)
}

#[test]
fn nvfp4_has_two_levels_of_scales() {
    check("nvfp4", |case| {
        if case.entry.name == "nvfp4_hadamard16" {
            let matrix: Vec<f32> = (0..256).map(|it| nvfp4::hadamard(it / 16, it % 16)).collect();
            case.expect_floats("matrix", &matrix);
            return;
        }
        let (x, rows, cols) = case.matrix("x");
        let expect = |codes: &str, scale_codes: &str, found: &[u8], scales: &[f32]| {
            case.expect_bytes(codes, &pack(found));
            case.expect_bytes(scale_codes, &quantize(scales, 1.0, Format::E4M3));
        };
        case.expect_floats("amax_row", &[amax(&x)]);
        if case.param("mode") == "2d" {
            let square = Blocks { rows, cols, block: [16, 16] };
            let (q, scales) = nv_quantized(&x, square);
            expect("q", "scale_e4m3", &q, &square.refined(&scales, [1, 16]));
            let [n, m] = square.grid();
            let (q_t, scales_t) = (transposed(&q, rows, cols), transposed(&scales, n, m));
            let of_transposed = Blocks { rows: cols, cols: rows, ..square };
            expect("q_t", "scale_e4m3_t", &q_t, &of_transposed.refined(&scales_t, [1, 16]));
            case.expect_floats("amax_col", &[amax(&x)]);
            return;
        }
        let row = Blocks { rows, cols, block: [1, 16] };
        let (q, scales) = nv_quantized(&x, row);
        expect("q", "scale_e4m3", &q, &scales);
        if case.has("scale_swizzled_row") {
            let found = swizzled(&codes(&scales, Format::E4M3), row.grid()[0], row.grid()[1]);
            case.expect_bytes("scale_swizzled_row", &found);
        }
        let mut x_t = transposed(&x, rows, cols);
        if case.param("mode") == "rht" {
            x_t = nvfp4::hadamard_transformed(&x_t);
            case.expect_floats("rht_xt", &x_t);
        }
        let (q, scales) = nv_quantized(&x_t, Blocks { rows: cols, cols: rows, block: [1, 16] });
        expect("q_t", "scale_e4m3_t", &q, &scales);
        case.expect_floats("amax_col", &[amax(&x_t)]);
    });
}

#[test]
fn stochastic_rounding_spends_a_byte_on_each_element() {
    check("nvfp4_sr", |case| {
        let (x, bytes) = (case.floats("x_scaled"), case.bytes("rbits8"));
        let found = x.iter().zip(bytes).map(|(&x, byte)| nvfp4::encode_stochastic(x, byte));
        case.expect_bytes("nibble", &found.collect::<Vec<u8>>());
    });
}

#[test]
fn shards_with_the_amax_of_their_group_are_slices_of_the_whole() {
    check("sharded_quant", |case| {
        let ((w, rows, cols), format) = (case.matrix("w"), case.format());
        let rule = ScaleRule { pow2: case.param("pow2") == true, ..ScaleRule::tensor(format) };
        let size = |axis: &str| case.param("mesh")[axis].as_u64().unwrap() as usize;
        let [replicas, shards, tp] = ["dp_replicate", "dp_shard", "tp"].map(size);
        // TP cuts columns, or else rows, which are then in the map. Elements of a rank, in order:
        let map = case.ints("row_map");
        let shard = |dp: usize, t: usize| -> Vec<usize> {
            let width = if case.param("tp_dim") == 1 { cols / tp } else { cols };
            let first = if case.param("tp_dim") == 1 { t * width } else { 0 };
            let owned = map[(dp * tp + t) * rows..][..rows].iter().filter(|&&it| it >= 0);
            owned
                .flat_map(|&row| (0..width).map(move |it| row as usize * cols + first + it))
                .collect()
        };
        let local = |dp, t| shard(dp, t).into_iter().map(|it| w[it]).collect::<Vec<f32>>();
        let local_amax = |dp, t| amax(&local(dp, t));
        let ranks = || (0..shards).flat_map(|dp| (0..tp).map(move |t| (dp, t)));

        let amaxes: Vec<f32> = ranks().map(|(dp, t)| local_amax(dp, t)).collect();
        case.expect_floats("local_amax", &amaxes.repeat(replicas));
        let of_group = amax(&amaxes);
        case.expect_floats("amax_weight_mesh", &[of_group]);
        let scale = rule.scale(of_group);
        case.expect_floats("scale", &[scale]);
        case.expect_floats("scale_inv", &[1.0 / scale]);
        let whole = case.bytes("q_global");
        for (dp, t) in ranks() {
            let slice: Vec<u8> = shard(dp, t).into_iter().map(|it| whole[it]).collect();
            assert_eq!(
                quantize(&local(dp, t), scale, format),
                slice,
                "{} {dp} {t}",
                case.entry.name
            );
        }
        let of_dp = |t| (0..shards).map(|dp| local_amax(dp, t)).collect::<Vec<f32>>();
        let scales: Vec<f32> = (0..tp).map(|t| rule.scale(amax(&of_dp(t)))).collect();
        case.expect_floats("scale_if_reduced_over_dp_only", &scales);
    });
}

/// A matrix after quantization and dequantization.
type Matrix = (Vec<f32>, usize, usize);

fn transpose((x, rows, cols): Matrix) -> Matrix {
    (transposed(&x, rows, cols), cols, rows)
}

/// `a bᵀ` in f64.
fn product((a, m, k): &Matrix, (b, n, _): &Matrix) -> Vec<f64> {
    let dot = |i: usize, j: usize| -> f64 {
        let (a, b) = (&a[i * k..][..*k], &b[j * k..][..*k]);
        a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    (0..m * n).map(|it| dot(it / n, it % n)).collect()
}

fn tensor_kept((x, rows, cols): &Matrix, format: Format) -> Matrix {
    let scale = ScaleRule::tensor(format).scale(amax(x));
    (dequantize(&quantize(x, scale, format), 1.0 / scale, format), *rows, *cols)
}

fn mx_kept((x, rows, cols): &Matrix, block: [usize; 2]) -> Matrix {
    let blocks = Blocks { rows: *rows, cols: *cols, block };
    let (q, scales) = mx_quantized(x, blocks, Format::E4M3);
    (blocks.dequantize(&q, &numbers(&scales, Format::E8M0), Format::E4M3), *rows, *cols)
}

fn nv_kept((x, rows, cols): &Matrix, block: [usize; 2]) -> Matrix {
    let blocks = Blocks { rows: *rows, cols: *cols, block };
    let (q, scales) = nv_quantized(x, blocks);
    let level = Level::new(amax(x));
    let scale_inv: Vec<f32> = scales.iter().map(|&it| level.scale_inv(it)).collect();
    (blocks.dequantize(&q, &scale_inv, Format::E2M1), *rows, *cols)
}

/// The operands of fprop, dgrad and wgrad, each a pair to be contracted over its columns.
fn operands(recipe: &str, [x, w, dy]: [Matrix; 3]) -> [[Matrix; 2]; 3] {
    match recipe {
        "Float8CurrentScaling" => {
            let (x, w) = (tensor_kept(&x, Format::E4M3), tensor_kept(&w, Format::E4M3));
            let dy = tensor_kept(&dy, Format::E5M2);
            [[x.clone(), w.clone()], [dy.clone(), transpose(w)], [transpose(dy), transpose(x)]]
        }
        "MXFP8BlockScaling" => {
            let (row, col) = ([1, 32], [32, 1]);
            [
                [mx_kept(&x, row), mx_kept(&w, row)],
                [mx_kept(&dy, row), transpose(mx_kept(&w, col))],
                [transpose(mx_kept(&dy, col)), transpose(mx_kept(&x, col))],
            ]
        }
        "NVFP4BlockScaling(disable_stochastic_rounding)" => {
            let (row, square) = ([1, 16], [16, 16]);
            let mixed = |it: Matrix| {
                let (it, rows, cols) = transpose(it);
                nv_kept(&(nvfp4::hadamard_transformed(&it), rows, cols), row)
            };
            let w = nv_kept(&w, square);
            [
                [nv_kept(&x, row), w.clone()],
                [nv_kept(&dy, row), transpose(w)],
                [mixed(dy), mixed(x)],
            ]
        }
        other => panic!("recipe {other}"),
    }
}

#[test]
fn the_three_gemms_read_the_copies_that_their_recipe_says() {
    check("gemm", |case| {
        let recipe = case.param("recipe").as_str().unwrap();
        let operands = operands(recipe, ["x", "w", "dy"].map(|it| case.matrix(it)));
        let largest = case.floats("max_abs_dot");
        for ((role, [a, b]), largest) in ["y", "dx", "dw"].into_iter().zip(operands).zip(largest) {
            // The manifest's formula without its term for a result in bf16, which this is not. It allows
            // for dequantized operands that are rounded to f32, too.
            let off = a.2 as f64 * 2f64.powi(-22) * f64::from(largest);
            let expect = case.floats(role);
            let found = product(&a, &b);
            assert_eq!(found.len(), expect.len());
            for (i, (found, &expect)) in found.iter().zip(&expect).enumerate() {
                let near = (found - f64::from(expect)).abs() <= off;
                assert!(near, "{}: {role}[{i}] is {found:e} and not {expect:e}", case.entry.name);
            }
        }
    });
}

/// Of golden codes, so that only the GEMM is under test: `x xᵀ` with row blocks, and with square blocks on
/// either side, is the product of the dequantized operands up to rounding.
#[test]
fn the_gemm_of_blocks_multiplies_dequantized_operands() {
    let name = |kind: &str| format!("{kind}_n130x260_bf16_e5m2_f32");
    let entries = cases();
    let entry = |kind: &str| entries.iter().find(|it| it.name == name(kind)).unwrap();
    let load = |entry: &Entry| -> (Vec<f32>, Vec<f32>) {
        let bytes = std::fs::read(golden(&entry.file)).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let case = Case { entry, tensors: &tensors, read: RefCell::default() };
        (numbers(&case.bytes("q"), case.format()), case.floats("scale_inv"))
    };
    let (rows, cols) = (130, 260);
    let row = (load(entry("block1d")), Blocks { rows, cols, block: [1, 128] });
    let square = (load(entry("block2d")), Blocks { rows, cols, block: [128, 128] });
    for (a, b) in [(&row, &row), (&row, &square), (&square, &row)] {
        let kept =
            |it: &((Vec<f32>, Vec<f32>), Blocks)| (it.1.scaled(&it.0.0, &it.0.1), rows, cols);
        let (exact, of_magnitudes) = (product(&kept(a), &kept(b)), {
            let magnitudes = |it: Matrix| (it.0.iter().map(|it| it.abs()).collect(), rows, cols);
            product(&magnitudes(kept(a)), &magnitudes(kept(b)))
        });
        fn operand(it: &((Vec<f32>, Vec<f32>), Blocks)) -> Operand<'_> {
            Operand { numbers: &it.0.0, scale_inv: &it.0.1, blocks: it.1 }
        }
        for ((found, exact), magnitude) in
            block_gemm(&operand(a), &operand(b)).into_iter().zip(exact).zip(of_magnitudes)
        {
            // Each of 3 blocks is rounded 3 times, and operands that are dequantized once each.
            let off = magnitude * 11.0 * 2f64.powi(-24);
            assert!((f64::from(found) - exact).abs() <= off, "{found:e} and not {exact:e}");
        }
    }
}
