use polarshard_muon::{Decision, Error, MatrixShape, Reason, RoutingTable, Rule, Rules};
use proptest::prelude::*;

fn route(rules: &Rules, params: &[(&str, &[usize])]) -> Result<RoutingTable, Error> {
    let params: Vec<_> = params
        .iter()
        .map(|(name, shape)| ((*name).to_owned(), shape.to_vec()))
        .collect();
    rules.route(&params)
}

/// The matrices of one parameter, as (offset, rows, cols); none if it is AdamW's.
fn matrices(rules: &Rules, name: &str, shape: &[usize]) -> Option<Vec<(usize, usize, usize)>> {
    let table = route(rules, &[(name, shape)]).unwrap();
    match &table.entries()[0].decision {
        Decision::Muon(all) => Some(all.iter().map(|m| (m.offset, m.rows, m.cols)).collect()),
        Decision::AdamW => None,
    }
}

#[test]
fn the_default_rule() {
    let rules = Rules::new();
    assert_eq!(
        matrices(&rules, "layer.weight", &[4, 6]),
        Some(vec![(0, 4, 6)])
    );
    assert_eq!(
        matrices(&rules, "experts", &[2, 4, 6]),
        Some(vec![(0, 4, 6), (24, 4, 6)])
    );
    assert_eq!(
        matrices(&rules, "conv.weight", &[8, 3, 5, 5]),
        Some(vec![(0, 8, 75)])
    );
    assert_eq!(
        matrices(&rules, "conv3d.weight", &[8, 3, 2, 5, 5]),
        Some(vec![(0, 8, 150)])
    );
    for (name, shape) in [
        ("layer.bias", &[4][..]),
        ("scalar", &[]),
        ("model.embed_tokens.weight", &[4, 6]),
        ("Token_Embedding.weight", &[4, 6]),
        ("LM_HEAD.weight", &[4, 6]),
        ("empty", &[0, 6]),
        ("empty_stack", &[3, 4, 0]),
    ] {
        assert_eq!(matrices(&rules, name, shape), None, "{name}");
    }
}

#[test]
fn reasons_are_given_in_the_order_of_the_parameters() {
    let rules = Rules::new()
        .with("b*", Rule::AdamW)
        .with("none, *", Rule::Stack);
    let table = route(
        &rules,
        &[
            ("z", &[2, 2]),
            ("b", &[2, 2]),
            ("a", &[2]),
            ("embed", &[2, 2]),
            ("n", &[0, 2]),
            ("none of many", &[1 << 62, 0, 4]),
            ("none, by a rule", &[0, 1 << 40, 1 << 40, 1 << 40]),
        ],
    )
    .unwrap();
    let reasons: Vec<_> = table.entries().iter().map(|r| r.reason.clone()).collect();
    let expected = [
        Reason::Hidden,
        Reason::Rule("b*".to_owned()),
        Reason::FewDimensions,
        Reason::Name("embed"),
        Reason::Empty,
        Reason::Empty,
        Reason::Empty,
    ];
    assert_eq!(reasons, expected);
    assert_eq!(table.get("a").unwrap().shape, [2]);
    assert!(table.get("absent").is_none());
}

#[test]
fn rules_override_and_the_first_match_holds() {
    let rules = Rules::new()
        .with("*.QKV.*", Rule::SplitRows(vec![4, 1, 1]))
        .with("h.?.proj", Rule::Heads(3))
        .with("*conv1d*", Rule::Convolution)
        .with("*4d*", Rule::Stack)
        .with("embed*", Rule::Muon)
        .with("*", Rule::AdamW);
    let params: &[(&str, &[usize])] = &[
        ("h.0.qkv.weight", &[6, 5]),
        ("h.1.proj", &[6, 5]),
        ("conv1d", &[6, 5, 3]),
        ("a4d", &[2, 2, 3, 4]),
        ("embed", &[7, 5]),
        ("rest", &[7, 5]),
    ];
    let table = route(&rules, params).unwrap();
    let shapes: Vec<_> = table
        .entries()
        .iter()
        .map(|routed| match &routed.decision {
            Decision::Muon(all) => all.iter().map(|m| (m.offset, m.rows, m.cols)).collect(),
            Decision::AdamW => vec![],
        })
        .collect();
    assert_eq!(shapes[0], [(0, 4, 5), (20, 1, 5), (25, 1, 5)]);
    assert_eq!(shapes[1], [(0, 2, 5), (10, 2, 5), (20, 2, 5)]);
    assert_eq!(shapes[2], [(0, 6, 15)]);
    assert_eq!(shapes[3], [(0, 3, 4), (12, 3, 4), (24, 3, 4), (36, 3, 4)]);
    assert_eq!(shapes[4], [(0, 7, 5)]);
    assert!(shapes[5].is_empty());
}

#[test]
fn suspicious_names_are_warned_of_unless_a_rule_speaks() {
    let suspicious = [
        "transformer.wte.weight",
        "wpe",
        "emb.weight",
        "model.head.weight",
        "cls_head.weight",
        "Output.weight",
    ];
    for name in suspicious {
        let table = route(&Rules::new(), &[(name, &[4, 4])]).unwrap();
        let warnings: Vec<_> = table.warnings().collect();
        assert_eq!(warnings.len(), 1, "{name}");
        assert!(warnings[0].contains(name), "{warnings:?}");
        for rule in [Rule::Muon, Rule::AdamW] {
            let rules = Rules::new().with("*", rule);
            assert_eq!(
                route(&rules, &[(name, &[4, 4])])
                    .unwrap()
                    .warnings()
                    .count(),
                0
            );
        }
    }
    let plain: [(&str, &[usize]); 4] = [
        ("lm_head.weight", &[4, 4]),
        ("attention.output.dense.weight", &[4, 4]),
        ("head.bias", &[4]),
        ("mlp.up.weight", &[4, 4]),
    ];
    assert_eq!(route(&Rules::new(), &plain).unwrap().warnings().count(), 0);
}

#[test]
fn the_table_prints_aligned() {
    let rules = Rules::new().with("h.qkv", Rule::SplitRows(vec![4, 1, 1]));
    let params: &[(&str, &[usize])] = &[
        ("wte", &[9, 5]),
        ("h.qkv", &[6, 5]),
        ("h.experts", &[2, 6, 5]),
        ("b", &[6]),
    ];
    let expected = "\
parameter  shape      group  matrices       reason
wte        [9, 5]     muon   9x5            two or more dimensions
h.qkv      [6, 5]     muon   4x5, 2 of 1x5  rule \"h.qkv\"
h.experts  [2, 6, 5]  muon   2 of 6x5       two or more dimensions
b          [6]        adamw  -              fewer than two dimensions
warning: \"wte\" is in muon, but \"wte\" suggests an embedding or an output head; \
a rule for it, muon or adamw, says which
";
    assert_eq!(route(&rules, params).unwrap().to_string(), expected);
}

#[test]
fn errors_name_the_rule_or_the_parameter() {
    let weight: (&str, &[usize]) = ("a.weight", &[6, 5]);
    let bias: (&str, &[usize]) = ("a.bias", &[6]);
    let conv: (&str, &[usize]) = ("a.conv", &[6, 5, 3, 3]);
    let message = |rule: Rule, param| {
        route(&Rules::new().with("a.*", rule), &[param])
            .unwrap_err()
            .to_string()
    };
    let unused = Rules::new()
        .with("a.*", Rule::Muon)
        .with("nothing.*", Rule::Muon);
    let cases = [
        (
            route(&unused, &[weight]).unwrap_err().to_string(),
            "rule \"nothing.*\" matches no parameter",
        ),
        (
            route(&Rules::new(), &[weight, weight])
                .unwrap_err()
                .to_string(),
            "parameter \"a.weight\" is listed twice",
        ),
        (
            message(Rule::Muon, bias),
            "parameter \"a.bias\" of shape [6] cannot be muon: it needs two or more dimensions",
        ),
        (
            message(Rule::Convolution, bias),
            "parameter \"a.bias\" of shape [6] cannot be a convolution: it needs two or more dimensions",
        ),
        (
            message(Rule::Stack, bias),
            "parameter \"a.bias\" of shape [6] cannot be a stack of matrices: it needs two or more dimensions",
        ),
        (
            message(Rule::Heads(2), conv),
            "parameter \"a.conv\" of shape [6, 5, 3, 3] cannot be split into 2 heads: it needs two dimensions",
        ),
        (
            message(Rule::SplitRows(vec![4, 1]), weight),
            "parameter \"a.weight\" has 6 rows, which cannot be split into rows [4, 1]",
        ),
        (
            message(Rule::SplitRows(vec![6, 0]), weight),
            "parameter \"a.weight\" has 6 rows, which cannot be split into rows [6, 0]",
        ),
        (
            message(Rule::SplitRows(vec![usize::MAX, 7]), weight),
            &format!(
                "parameter \"a.weight\" has 6 rows, which cannot be split into rows [{}, 7]",
                usize::MAX
            ),
        ),
        (
            message(Rule::Heads(4), weight),
            "parameter \"a.weight\" has 6 rows, which cannot be split into 4 heads",
        ),
        (
            message(Rule::Heads(0), weight),
            "parameter \"a.weight\" has 6 rows, which cannot be split into 0 heads",
        ),
    ];
    for (message, expected) in cases {
        assert_eq!(message, expected);
    }
}

fn rule_and_shape() -> impl Strategy<Value = (Rule, Vec<usize>)> {
    let side = 1..9usize;
    let split = (prop::collection::vec(side.clone(), 1..6), side.clone())
        .prop_map(|(rows, cols)| (Rule::SplitRows(rows.clone()), vec![rows.iter().sum(), cols]));
    let heads = (side.clone(), side.clone(), side.clone())
        .prop_map(|(heads, rows, cols)| (Rule::Heads(heads), vec![heads * rows, cols]));
    let shaped = prop::sample::select(vec![Rule::Muon, Rule::Convolution, Rule::Stack]);
    let any = (shaped, prop::collection::vec(side, 2..6));
    prop_oneof![split, heads, any]
}

proptest! {
    /// The matrices of a Muon parameter tile it, in order.
    #[test]
    fn matrices_tile_their_parameter((rule, shape) in rule_and_shape()) {
        let table = route(&Rules::new().with("*", rule), &[("w", &shape)]).unwrap();
        let Decision::Muon(matrices) = &table.entries()[0].decision else {
            panic!("a muon rule holds");
        };
        let mut end = 0;
        for &MatrixShape { offset, rows, cols } in matrices {
            prop_assert_eq!(offset, end);
            prop_assert!(rows > 0 && cols > 0);
            end += rows * cols;
        }
        prop_assert_eq!(end, shape.iter().product::<usize>());
    }
}
