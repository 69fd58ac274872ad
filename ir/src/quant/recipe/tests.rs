//! Operands, accumulation and errors of each recipe.

use super::*;

/// The default of a recipe in RON, as a user states it.
#[track_caller]
fn recipe(text: &str) -> Recipe {
    let extensions = ron::extensions::Extensions::UNWRAP_VARIANT_NEWTYPES
        | ron::extensions::Extensions::IMPLICIT_SOME;
    let options = ron::Options::default().with_default_extension(extensions);
    options.from_str(text).unwrap_or_else(|it| panic!("{text}: {it}"))
}

/// What is quantized and how, of input, weight and gradient.
#[track_caller]
fn check(text: &str, expect: [(Format, Scaling); 3]) {
    let recipe = recipe(text);
    assert_eq!(recipe.check(), Ok(()));
    let found = Role::ALL.map(|it| recipe.spec(it).map(|it| (it.format, it.scaling)));
    assert_eq!(found, expect.map(Some), "{text}");
}

/// Formats, block sizes and flags of TransformerEngine's defaults (`common/recipe/__init__.py`, and the
/// quantizers that `pytorch/quantization.py` makes of them).
#[test]
fn operands_are_those_of_transformer_engine() {
    use Format::{E2M1, E4M3, E5M2};
    let delayed = Scaling::Delayed { margin: 0, history: 1024, algo: AmaxAlgo::Max };
    check("DelayedScaling()", [(E4M3, delayed), (E4M3, delayed), (E5M2, delayed)]);
    check(
        "DelayedScaling(margin: 2, amax_history_len: 16, amax_compute_algo: MostRecent, fp8_format: E4M3)",
        [(E4M3, Scaling::Delayed { margin: 2, history: 16, algo: AmaxAlgo::MostRecent }); 3],
    );
    let current = Scaling::Current { pow2: false, epsilon: Number(0.0) };
    check("Float8CurrentScaling()", [(E4M3, current), (E4M3, current), (E5M2, current)]);
    check(
        "Float8CurrentScaling(use_power_2_scales: true, amax_epsilon: 1e-6, fp8_format: E4M3)",
        [(E4M3, Scaling::Current { pow2: true, epsilon: Number(1e-6) }); 3],
    );
    let block = |rows, pow2| (E4M3, Scaling::Block { rows, columns: 128, pow2 });
    check("Float8BlockScaling()", [block(1, true), block(128, true), block(1, true)]);
    check(
        "Float8BlockScaling(use_f32_scales: true, x_block_scaling_dim: 2, w_block_scaling_dim: 1)",
        [block(128, false), block(1, false), block(1, false)],
    );
    let mx = |two_dimensional| (E4M3, Scaling::Mx { two_dimensional });
    check("MXFP8BlockScaling()", [mx(false); 3]);
    check("MXFP8BlockScaling(enable_2d_quantization: true)", [mx(false), mx(true), mx(false)]);
    let nvfp4 = |two_dimensional, hadamard, stochastic| {
        (E2M1, Scaling::NvFp4 { two_dimensional, hadamard, stochastic })
    };
    check(
        "NVFP4BlockScaling()",
        [nvfp4(false, true, false), nvfp4(true, false, false), nvfp4(false, true, true)],
    );
    check(
        "NVFP4BlockScaling(disable_rht: true, disable_stochastic_rounding: true, \
         disable_2d_quantization: true)",
        [nvfp4(false, false, false); 3],
    );
}

#[test]
fn an_operand_that_custom_leaves_out_is_not_quantized() {
    let custom = recipe("Custom(input: (format: E4M3, scaling: Current()))");
    let current = Scaling::Current { pow2: false, epsilon: Number(0.0) };
    let input = QuantSpec { format: Format::E4M3, scaling: current };
    assert_eq!(Role::ALL.map(|it| custom.spec(it)), [Some(input), None, None]);
    assert_eq!(Role::ALL.map(|it| Recipe::Bf16.spec(it)), [None; 3]);
}

/// TransformerEngine: `_2X_ACC_FPROP` is false, `_2X_ACC_DGRAD` and `_2X_ACC_WGRAD` are true; block scaling
/// fixes `use_split_accumulator` to true for all three.
#[test]
fn only_fprop_of_per_tensor_operands_accumulates_fast() {
    let fast = |text| GemmRole::ALL.map(|it| recipe(text).fast_accumulation(it));
    assert_eq!(fast("DelayedScaling()"), [true, false, false]);
    assert_eq!(fast("Float8CurrentScaling()"), [true, false, false]);
    assert_eq!(fast("Float8BlockScaling()"), [false; 3]);
    assert_eq!(fast("Bf16"), [false; 3]);
}

#[track_caller]
fn check_error(text: &str, message: &str) {
    assert_eq!(recipe(text).check().map_err(|it| it.to_string()), Err(message.to_string()));
}

#[test]
fn fields_out_of_range_are_errors() {
    check_error("DelayedScaling(margin: -1)", "margin is -1, and must be from 0 to 17");
    check_error(
        "DelayedScaling(amax_history_len: 0)",
        "amax_history_len is 0, and must be at least 1",
    );
    check_error(
        "Float8CurrentScaling(amax_epsilon: -0.5)",
        "amax_epsilon is -0.5, and must be at least 0 and finite",
    );
    check_error(
        "Float8BlockScaling(w_block_scaling_dim: 3)",
        "w_block_scaling_dim is 3, and must be 1 or 2",
    );
    check_error(
        "Float8BlockScaling(grad_block_scaling_dim: 2)",
        "grad_block_scaling_dim is 2, and must be 1 where w_block_scaling_dim is 2: a GEMM takes one \
         such operand",
    );
    check_error(
        "Custom(weight: (format: E8M0, scaling: Mx()))",
        "weight.format is E8M0, and must be E4M3 or E5M2 with this scaling",
    );
    check_error(
        "Custom(grad: (format: E4M3, scaling: NvFp4(stochastic: true)))",
        "grad.format is E4M3, and must be E2M1 with this scaling",
    );
    check_error(
        "Custom(grad: (format: E5M2, scaling: Block(rows: 1, columns: 64)))",
        "grad.scaling.columns is 64, and must be 128",
    );
    check_error(
        "Custom(input: (format: E4M3, scaling: Delayed(history: 0)))",
        "input.scaling.history is 0, and must be at least 1",
    );
    check_error(
        "Custom(input: (format: E5M2, scaling: Current()), weight: (format: E5M2, scaling: Current()))",
        "input.format is E5M2, and must be E4M3 where that of weight is E5M2: no GEMM takes two of it",
    );
}
