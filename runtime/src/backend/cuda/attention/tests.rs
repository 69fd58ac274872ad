//! Plans without a GPU, and what they are kept as.

use ir::DType;

use super::*;
use crate::backend::cuda::cache::tests::Temporary;

const LLAMA: AttentionShape = AttentionShape {
    backward: false,
    dtype: DType::Bf16,
    batch: 1,
    s: 8192,
    t: 8192,
    heads: 32,
    kv_heads: 8,
    d: 128,
    causal: true,
    scale: 0.088_388_35,
};

/// Every shape for which a library is asked becomes a plan for an H200 that fits its scratch. Needs
/// cuDNN, NVRTC and some libcuda, and no GPU; skipped without them.
#[test]
fn plans_are_made_without_a_gpu() {
    let libraries = graph::cudnn();
    // SAFETY: it only tries to open libcuda.
    let driver = unsafe { cudarc::driver::sys::is_culib_present() };
    if libraries.is_err() || !driver {
        eprintln!("skipped: cuDNN, NVRTC or libcuda is not there");
        return;
    }
    let cudnn = libraries.expect("it was found");
    let folder = Temporary::new("plans");
    for shape in [
        LLAMA,
        AttentionShape { batch: 2, ..LLAMA },
        AttentionShape { batch: 3, heads: 4, kv_heads: 4, s: 77, t: 77, d: 64, ..LLAMA },
        AttentionShape { heads: 4, kv_heads: 1, s: 1, t: 1, ..LLAMA },
        AttentionShape { batch: 2, s: 33, t: 1024, causal: false, ..LLAMA },
        AttentionShape { s: 512, t: 100, d: 64, causal: false, ..LLAMA },
    ] {
        for backward in [false, true] {
            let shape = AttentionShape { backward, ..shape };
            let planned = plan_ahead_into(&folder.0, H200, &shape).expect("nothing fails");
            assert!(planned.is_ok(), "{shape:?}: {planned:?}");
            let saved = Saved::read(&folder.0, &key(cudnn, "NVIDIA H200", &shape));
            let plan: serde_json::Value =
                serde_json::from_str(&saved.expect("it was kept").plan).expect("cuDNN writes JSON");
            assert_eq!(plan["GPUProfile"]["deviceName"], "NVIDIA H200");
        }
    }
}

/// By what cuDNN's own log shows for `[1, 32, 512, 128]` with 8 key-value heads, but for the order of
/// positions and heads.
#[test]
fn operands_lie_as_the_op_has_them() {
    let it = Layout::separate(&AttentionShape { s: 512, t: 512, ..LLAMA });
    assert_eq!(it.q, [512 * 32 * 128, 128, 32 * 128, 1]);
    assert_eq!(it.k, [512 * 8 * 128, 128, 8 * 128, 1]);
    assert_eq!(it.lse, [512 * 32, 1, 32, 1]);
}

#[test]
fn a_plan_is_for_a_shape_a_gpu_and_a_version() {
    let text = "1, cuDNN 9.19.0, NVIDIA H200, forward causal bf16, 1 sequences of 8192 by 8192, 32 by 8 \
                heads of 128";
    assert_eq!(key_text("9.19.0", "NVIDIA H200", &LLAMA), text);
    let others = [
        AttentionShape { backward: true, ..LLAMA },
        AttentionShape { causal: false, ..LLAMA },
        AttentionShape { batch: 2, ..LLAMA },
        AttentionShape { s: 1, ..LLAMA },
        AttentionShape { t: 1, ..LLAMA },
        AttentionShape { heads: 16, ..LLAMA },
        AttentionShape { kv_heads: 4, ..LLAMA },
        AttentionShape { d: 64, ..LLAMA },
    ];
    assert!(others.iter().all(|it| key_text("9.19.0", "NVIDIA H200", it) != text));
    assert_ne!(key_text("9.20.0", "NVIDIA H200", &LLAMA), text);
    assert_ne!(key_text("9.19.0", "NVIDIA H100", &LLAMA), text);
    // One plan does for every scale.
    assert_eq!(key_text("9.19.0", "NVIDIA H200", &AttentionShape { scale: 1.0, ..LLAMA }), text);
}

#[test]
fn a_saved_plan_is_read_for_its_own_key_only() {
    let folder = Temporary::new("saved");
    let saved = Saved { key: "a".into(), plan: "{\"engine\": \"\u{3b1}\\n\"}".into() };
    assert_eq!(Saved::read(&folder.0, "a"), None);
    saved.write(&folder.0);
    assert_eq!(Saved::read(&folder.0, "a").as_ref(), Some(&saved));
    // Another key with the same hash, and a file that was cut off.
    let text = serde_json::to_vec(&saved).expect("two strings");
    folder.0.write(&Saved::file("b"), &text);
    assert_eq!(Saved::read(&folder.0, "b"), None);
    folder.0.write(&Saved::file("a"), &text[..text.len() - 2]);
    assert_eq!(Saved::read(&folder.0, "a"), None);
}
